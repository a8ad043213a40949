"""What kind of source a path is, by its name and place; reads no content.

    jsonl       .jsonl .ndjson .json, or one of them and .gz     one JSON object a line
    parquet     .parquet
    text        .txt                                             one document a file
    megatron    .bin, its .idx next to it
    mindrecord  .mindrecord .mindrecord0 ..., its .db next to it
    saved       a folder with dataset_info.json                  Hugging Face `save_to_disk`

Any other folder stands for the files in it and below, in the order of their paths, which must be of one kind. Other
files in it (a README, say) are counted; names that begin with a dot or an underscore are passed over.
"""

import collections
import os
import re
from pathlib import Path

from ms_varlen.errors import DataError

SAVED_DATASET = "dataset_info.json"
SAVED_SPLITS = "dataset_dict.json"
SUFFIXES = {
    "jsonl": r"\.(jsonl|ndjson|json)(\.gz)?",
    "parquet": r"\.parquet",
    "text": r"\.txt",
    "megatron": r"\.bin",
    "mindrecord": r"\.mindrecord\d*",
}
COMPANIONS = re.compile(r".*(\.idx|\.mindrecord\d*\.db)")
"""Second halves: they come with the file that is named."""
READABLE = (
    "a file that ends in .jsonl, .json, .ndjson (also .gz), .parquet, .txt, .bin (Megatron, .idx next to it) or "
    ".mindrecord, or a folder of one kind of them"
)


def kind_of(path: Path) -> str | None:
    """The kind of a file by its name; None when there is none."""
    return next((kind for kind, suffix in SUFFIXES.items() if re.search(suffix + "$", path.name)), None)


def source_fault(name: str) -> str | None:
    """Why `name` can be no source of files, as a message without the field's name; None when it may be one."""
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return None
        if not path.is_file():
            return f"must be an existing file or folder, got {name}; correct the path or use 'pydoc', which needs none"
    except OSError as error:  # a name that is too long, say
        return f"must be an existing file or folder, got {name[:80]} ({error.strerror}); correct the path"
    if not os.access(path, os.R_OK):
        return f"must be readable, got {name}; change its permissions"
    if kind_of(path) is None:
        return f"must be {READABLE}, got {name}; convert or rename it"
    return None


def files_of(path: Path, field: str) -> tuple[str, list[Path], int]:
    """The files that a path stands for.

    Args:
        path: exists.
        field: the recipe's key that names it, for errors.
    Returns:
        kind, files in their order, and how many files of no known kind lie among them.
    Raises:
        DataError: files of several kinds, none of a known one, or a half of a pair is missing.
    """
    if path.is_dir():
        if (path / SAVED_SPLITS).is_file():
            splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
            raise DataError(
                f"{field} must be one split of a saved data set, got all of them, in {path}; "
                f"name one of its folders ({splits})"
            )
        if (path / SAVED_DATASET).is_file():
            return "saved", [path], 0
        return _files_below(path, field)
    kind = kind_of(path)
    assert kind is not None, "source_fault saw to it"
    _check_companion(path)
    return kind, [path], 0


def _files_below(folder: Path, field: str) -> tuple[str, list[Path], int]:
    by_kind: dict[str, list[Path]] = collections.defaultdict(list)
    others: list[Path] = []
    walked: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if SAVED_DATASET in names:
            raise DataError(f"{field} must be a folder of files, got a saved data set, in {place}; name that folder")
        real = os.path.realpath(place)
        folders[:] = [] if real in walked else [name for name in folders if not name.startswith((".", "_"))]
        if real in walked:  # a link to a folder that was there already
            continue
        walked.add(real)
        for name in names:
            path = Path(place, name)
            if name.startswith((".", "_")) or COMPANIONS.fullmatch(name):
                continue
            kind = kind_of(path)
            (others if kind is None else by_kind[kind]).append(path)
    if not by_kind:
        found = f"{min(others)}" if others else "an empty folder"
        raise DataError(f"{field} must hold {READABLE}, got {found}, in {folder}; convert them or correct the path")
    if len(by_kind) > 1:
        found = " and ".join(str(min(paths)) for _, paths in sorted(by_kind.items()))
        raise DataError(
            f"{field} must be a folder of one kind of files, got {found}, in {folder}; "
            "move one kind away, or list them under data.source"
        )
    ((kind, paths),) = by_kind.items()
    paths.sort()
    for path in paths:
        _check_companion(path)
    return kind, paths, len(others)


def _check_companion(path: Path) -> None:
    kind = kind_of(path)
    second = {"megatron": path.with_suffix(".idx"), "mindrecord": path.with_name(path.name + ".db")}.get(kind or "")
    if second is not None and not second.is_file():
        raise DataError(f"{path} must have {second.name} next to it, got no such file; copy both")
