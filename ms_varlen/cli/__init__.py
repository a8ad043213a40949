"""`ms-varlen`: one file a command."""

from ms_varlen.cli.app import main as main
