"""Weights from elsewhere as a checkpoint of ours, which `model.init_from` takes and every tool here reads.

It has the mode "imported": no place in a plan. With moments, `ckpt-tools convert --to MODE --recipe R` makes it one
that training resumes from.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ckpt_tools.new_folder import new_folder
from ckpt_tools.step_folder import CARRIED_FOLDER, IMPORTED, write_step
from ckpt_tools.weights import Weights
from ms_varlen.checkpoint.tensors import running_total
from ms_varlen.models.hugging_face import CONFIG_FILE

_CARRIED = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
)
"""Files of a Hugging Face folder that go along with the weights."""


def carried_files(folder: Path) -> list[Path]:
    """The config's, the tokenizer's and the generation files of a folder."""
    found = {path for pattern in _CARRIED for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)


def import_weights(weights: Weights, destination: Path, progress: Callable[[int, int], None]) -> dict[str, Any]:
    """Write a folder with one checkpoint of ours, of mode "imported".

    Args:
        weights: what to write; fp32 on the way, which is exact for bf16 and fp16.
        destination: the folder to make; the checkpoint is `step_NNNNNNNN` in it.
        progress: called with bytes written and bytes in all.
    Returns:
        what was written, for people and `--json`.
    """
    total = sum(4 * tensor.nbytes // _width(tensor.dtype) for tensor in _tensors(weights))
    manifest = {
        "mode": IMPORTED,
        "layout": IMPORTED,
        "shapes": None,
        "model_config": weights.config.model_dump(mode="json"),
        "seq_length": weights.config.max_position_embeddings,
        "imported_from": {"kind": weights.kind, "dtype": weights.dtype, "buffers_left_out": weights.buffers},
    }
    tell = running_total(progress, total)
    with new_folder(destination, weights.tree or weights.path, total) as folder:
        state = json.dumps({"step": weights.step}).encode()
        step = write_step(folder, weights.step, weights.model, weights.optimizer, state, manifest, tell)
        if weights.carried is not None:
            (step / CARRIED_FOLDER).mkdir()
            for file in carried_files(weights.carried):
                shutil.copyfile(file, step / CARRIED_FOLDER / file.name)
    return {
        "source": str(weights.path),
        "kind": weights.kind,
        "destination": str(destination / step.name),
        "architecture": weights.config.architecture,
        "source_dtype": weights.dtype,
        "parameters": len(weights.model),
        "optimizer": bool(weights.optimizer),
        "step": weights.step,
        "buffers_left_out": weights.buffers,
        "bytes": total,
    }


def _tensors(weights: Weights) -> Iterable[Any]:
    return (*weights.model.values(), *weights.optimizer.values())


def _width(dtype: str) -> int:
    return {"F64": 8, "I64": 8, "F32": 4}.get(dtype, 2)
