"""`ms-varlen`: one file a command."""
