"""Batches that a loader dumped: read from a file, linted one by one.

An ``.npz`` holds one batch (``input_ids``, ``labels``, ...) or several (``0/input_ids``, ``1/input_ids``, ...); a
``.jsonl`` holds an object a line, lists of numbers by name. One batch that cannot be read is a finding, and the others
are linted all the same.
"""

import functools
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.diagnose.lint.columns import Finding
from ms_varlen.diagnose.lint.lint import lint_batch
from ms_varlen.errors import DataError

Reader = Callable[[], Mapping[str, np.ndarray]]
"""Reads one batch; raises a DataError where it cannot."""

HOW = """MindFormers (graph mode; `dataset` is the one that its Trainer builds):
    batches = {}
    for i, batch in zip(range(20), dataset.create_dict_iterator(num_epochs=1, output_numpy=True)):
        batches.update({f"{i}/{k}": v for k, v in batch.items()})
    numpy.savez("batches.npz", **batches)

MindSpeed and Megatron (in `forward_step`, after `get_batch`; `cu_seqlens` is None where rows are not packed):
    dump = dict(input_ids=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
    dump = {k: v.cpu().numpy() for k, v in dump.items() if v is not None}
    numpy.savez(f"batches-{step}.npz", **dump)

transformers (labels are not shifted there; that is understood):
    batches = {f"{i}/{k}": v for i, b in zip(range(20), trainer.get_train_dataloader()) for k, v in b.items()}
    batches = {k: v.cpu().numpy() for k, v in batches.items() if hasattr(v, "cpu") and v.ndim in (1, 2)}
    numpy.savez("batches.npz", **batches)
"""


def lint_file(path: Path, pad_id: int | None = None, limit: int | None = None) -> dict[str, Any]:
    """Lint the batches of a file.

    Args:
        path: ``.npz`` or ``.jsonl``.
        pad_id: the id that padding has; see `lint_batch`.
        limit: batches to look at; by default all.
    Returns:
        `batches` (how many were read), `findings` (a row each: `batch`, `code`, `text`) and `codes` (how often).
    Raises:
        DataError: the file is none of these, cannot be opened, or holds no batch.
    """
    findings: list[dict[str, Any]] = []
    count = 0
    for name, read in _batches(path):
        if limit is not None and count >= limit:
            break
        count += 1
        findings += [{"batch": name, "code": finding.code, "text": finding.text} for finding in _lint(read, pad_id)]
    if count == 0:
        raise DataError(f"{path} must hold a batch, got none; dump one as `ms-varlen lint-batches --how` shows")
    codes: dict[str, int] = {}
    for finding in findings:
        codes[finding["code"]] = codes.get(finding["code"], 0) + 1
    return {"file": str(path), "batches": count, "pad_id": pad_id, "findings": findings, "codes": codes}


def _lint(read: Reader, pad_id: int | None) -> list[Finding]:
    try:
        return lint_batch(read(), pad_id)
    except DataError as error:
        return [Finding(error.code or "DATA-SOURCE", str(error))]


def _batches(path: Path) -> Iterator[tuple[str, Reader]]:
    if not path.is_file():
        raise DataError(f"FILE must be an existing file, got {path}; correct the path")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _npz_batches(path)
    if suffix in (".jsonl", ".json"):
        return _json_batches(path)
    raise DataError(f"FILE must end with .npz or .jsonl, got {path.name}; dump batches as --how shows")


UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError)
"""What NumPy raises for a file that is cut off, damaged, or of something else than plain arrays."""


def _npz_batches(path: Path) -> Iterator[tuple[str, Reader]]:
    try:
        arrays = np.load(path, allow_pickle=False)
    except UNREADABLE as error:
        raise _no_npz(path, error) from error
    with arrays:
        grouped: dict[str, dict[str, str]] = {}
        for key in arrays.files:
            numbered = re.fullmatch(r"(\d+)/(.+)", key)
            batch, name = (numbered[1], numbered[2]) if numbered else ("0", key)
            grouped.setdefault(batch, {})[name] = key
        for batch in sorted(grouped, key=int):
            yield batch, functools.partial(_npz_batch, path, arrays, grouped[batch])


def _npz_batch(path: Path, arrays: Mapping[str, np.ndarray], keys: dict[str, str]) -> dict[str, np.ndarray]:
    try:
        return {name: arrays[key] for name, key in keys.items()}
    except UNREADABLE as error:
        raise _no_npz(path, error) from error


def _no_npz(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} must be a NumPy .npz of plain arrays, got {error}; dump it with numpy.savez")


def _json_batches(path: Path) -> Iterator[tuple[str, Reader]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield str(number), functools.partial(_json_batch, f"{path} line {number}", line)


def _json_batch(where: str, line: bytes) -> dict[str, np.ndarray]:
    try:
        entry = json.loads(line)
        return {name: np.asarray(values) for name, values in entry.items() if isinstance(values, list)}
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(
            f"a line must be a JSON object of lists, got {error}, in {where}; mend or remove the line"
        ) from error
