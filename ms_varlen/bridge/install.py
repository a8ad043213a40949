"""Whether MindFormers is there, and what to install if not."""

import importlib.util

from ms_varlen.errors import VarlenError


def require_mindformers() -> None:
    """Refuse to go on without MindFormers.

    Raises:
        VarlenError: it is not installed; the message says how to install it.
    """
    if importlib.util.find_spec("mindformers") is None:
        raise VarlenError(
            "the bridge must find the package mindformers (1.9), got none; install it with pip install "
            "'ms_varlen[mindformers]' or pip install 'mindformers==1.9.*'"
        )
