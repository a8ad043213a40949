"""Whether files can be written somewhere, asked before the work whose result they hold. Makes nothing."""

import os
from pathlib import Path


def folder_fault(folder: Path) -> str | None:
    """Why no file can be written in a folder, which need not exist yet; None where one can."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} is not writable"
    return None
