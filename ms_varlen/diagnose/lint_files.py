"""Batches that a loader dumped: read from a file, linted one by one.

An ``.npz`` holds one batch (``input_ids``, ``labels``, ...) or several (``0/input_ids``, ``1/input_ids``, ...); a
``.jsonl`` holds an object a line, lists of numbers by name.
"""

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.diagnose.lint import lint_batch
from ms_varlen.errors import DataError

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
        DataError: the file is none of these, or holds no batch.
    """
    findings: list[dict[str, Any]] = []
    count = 0
    for name, batch in _batches(path):
        if limit is not None and count >= limit:
            break
        count += 1
        findings += [
            {"batch": name, "code": finding.code, "text": finding.text} for finding in lint_batch(batch, pad_id)
        ]
    if count == 0:
        raise DataError(f"{path} must hold a batch, got none; dump one as `ms-varlen lint-batches --how` shows")
    codes: dict[str, int] = {}
    for finding in findings:
        codes[finding["code"]] = codes.get(finding["code"], 0) + 1
    return {"file": str(path), "batches": count, "pad_id": pad_id, "findings": findings, "codes": codes}


def _batches(path: Path) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    if not path.is_file():
        raise DataError(f"FILE must be an existing file, got {path}; correct the path")
    if path.suffix == ".npz":
        return _npz_batches(path)
    if path.suffix in (".jsonl", ".json"):
        return _json_batches(path)
    raise DataError(f"FILE must end with .npz or .jsonl, got {path.name}; dump batches as --how shows")


def _npz_batches(path: Path) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            grouped: dict[str, dict[str, str]] = {}
            for key in arrays.files:
                numbered = re.fullmatch(r"(\d+)/(.+)", key)
                batch, name = (numbered[1], numbered[2]) if numbered else ("0", key)
                grouped.setdefault(batch, {})[name] = key
            for batch in sorted(grouped, key=int):
                yield batch, {name: arrays[key] for name, key in grouped[batch].items()}
    except (zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} must be a NumPy .npz of plain arrays, got {error}; dump it with numpy.savez"
        ) from error


def _json_batches(path: Path) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            batch = {name: np.asarray(values) for name, values in entry.items() if isinstance(values, list)}
        except (ValueError, AttributeError) as error:
            raise DataError(
                f"a line must be a JSON object of lists, got {error}, in {path} line {number}; mend or remove the line"
            ) from error
        yield str(number), batch
