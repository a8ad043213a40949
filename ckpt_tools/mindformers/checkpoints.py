"""Checkpoints of MindFormers 1.9, in and out, in both of its folder layouts.

    legacy   rank_0/PREFIX_rank_0-EPOCH_STEP.safetensors (or .ckpt), meta.json: weights, moments, counters in one file
    new      latest_checkpointed_iteration.txt, iteration_00000016/PREFIX-model-0000000-0000001.safetensors,
             PREFIX-opt-..., common.json

An export holds a `config.json` and a `mindformers_model.yaml`, so the way back needs no other file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from ckpt_tools.mindformers.config import default_class, mindformers_section, read_config
from ckpt_tools.mindformers.names import (
    ModelClass,
    RowLayout,
    WeightLayout,
    check_expressible,
    from_mindformers,
    is_fused,
    model_class_of,
    to_mindformers,
)
from ckpt_tools.mindformers.shards import merged_tensors
from ckpt_tools.new_folder import new_folder
from ckpt_tools.parameters import MOMENTS
from ckpt_tools.weights import EMBEDDING, Weights, checked
from ms_varlen.checkpoint.store import APPLIED_STEPS
from ms_varlen.checkpoint.tensors import StoredTensor, cast, from_array, running_total, write_safetensors
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import CONFIG_FILE, hugging_face_config

MODEL_YAML = "mindformers_model.yaml"
PREFIX = "ms_varlen"
GLOBAL_STEP = "global_step"

_COUNTERS = (
    *("epoch_num", "step_num", GLOBAL_STEP, "global_batch_size", "loss_scale", "scale_sense"),
    *("current_iterator_step", "last_overflow_iterator_step", "learning_rate", "beta1_power", "beta2_power"),
)
"""Entries of a MindFormers checkpoint other than weights and moments; only `global_step` has a place here."""


def open_mindformers(
    path: Path, config: Path | None, qkv: RowLayout | None, mlp: RowLayout | None, strategy: Path | None
) -> Weights:
    """The weights, and the moments where there are any, of a checkpoint of MindFormers.

    Args:
        path: a file, a rank's folder, a folder of ranks, an iteration's folder, a training's output folder.
        config: see `read_config`; by default the files that `export_mindformers` writes next to it.
        qkv: rows of fused q, k and v; by default as the config says, else interleaved.
        mlp: rows of fused gate and up; likewise.
        strategy: how tensors were cut over ranks; see `merged_tensors`.
    Raises:
        CheckpointError: not found, damaged, cut without a strategy, or not what the config says.
    """
    found, where = merged_tensors(path, strategy)
    return weights_of(found, path, where, config or config_beside(path), qkv, mlp)


def weights_of(
    found: Mapping[str, StoredTensor],
    path: Path,
    where: str,
    config: Path | None,
    qkv: RowLayout | None = None,
    mlp: RowLayout | None = None,
) -> Weights:
    """The weights among merged tensors.

    Args:
        found, where: as `merged_tensors` gives them.
        path, config, qkv, mlp: see `open_mindformers`.
    Raises:
        CheckpointError: see there.
    """
    model_class = model_class_of(found)
    if model_class is None:
        raise CheckpointError(no_names_of_mindformers(found, where))
    if config is None:
        raise CheckpointError(
            f"{path}: MindFormers' checkpoints do not say their model; give --config: the YAML of its training, the "
            "model's config.json, or a recipe"
        )
    decoder, said = read_config(config)
    layout = WeightLayout(
        model_class,
        model_class == "qwen3" or is_fused(found),
        qkv or (said.qkv if said else "interleaved"),
        mlp or (said.mlp if said else "interleaved"),
    )
    check_expressible(decoder, model_class)
    weights, moments, counters = parts_of(found)
    step = int(counters[GLOBAL_STEP].read().reshape(-1)[0]) if GLOBAL_STEP in counters else 0
    return checked(
        path,
        "mindformers",
        decoder,
        from_mindformers(weights, decoder, layout),
        from_mindformers(moments, decoder, layout),
        step,
    )


def parts_of(
    found: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The weights, the moments and the counters among a checkpoint's tensors."""
    counters = {name: tensor for name, tensor in found.items() if name in _COUNTERS or name.startswith("accu_grads.")}
    moments = {name: t for name, t in found.items() if name.startswith(tuple(f"{m}." for m in MOMENTS))}
    weights = {name: t for name, t in found.items() if name not in counters and name not in moments}
    return weights, moments, counters


def no_names_of_mindformers(found: Mapping[str, object], where: str) -> str:
    """The fault of a checkpoint that no class of MindFormers has the names of."""
    if EMBEDDING in found:
        return (
            f"{where}: has the names of Hugging Face, which are read with the {CONFIG_FILE} of the model beside; bring "
            "that file along, and where it is there use `ckpt-tools import-hf`"
        )
    if not found:
        return f"{where}: must hold parameters, found none; bring the whole checkpoint along"
    return (
        f"{where}: must have the parameter names of MindFormers' LlamaForCausalLM (legacy) or Qwen3ForCausalLM "
        f"(mcore), found {', '.join(sorted(found)[:3])}, ...; other classes are not converted"
    )


def config_beside(path: Path) -> Path | None:
    """The file that says a checkpoint's model: one that `export_mindformers` writes next to it, or a `config.json`."""
    for folder in (path, *list(path.parents)[:2]):
        for name in (MODEL_YAML, CONFIG_FILE):
            if (folder / name).is_file():
                return folder / name
    return None


def export_mindformers(
    weights: Weights,
    destination: Path,
    model_class: ModelClass | None,
    files: Literal["legacy", "new"] | None,
    fused: bool,
    qkv: RowLayout,
    mlp: RowLayout,
    seq_length: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write a checkpoint that MindFormers loads, moments included where there are any.

    Args:
        weights: what to write.
        destination: the folder to make.
        model_class: by default that of the family.
        files: the folder layout; by default the one that the class trains with.
        fused: one weight for q, k and v, and one for gate and up (llama; qwen3 has no others).
        qkv: rows of fused q, k and v.
        mlp: rows of fused gate and up.
        seq_length: for the YAML, in tokens.
        progress: called with bytes written and bytes in all.
    Returns:
        what was written, for people and `--json`.
    Raises:
        CheckpointError: the class cannot express this decoder.
    """
    model_class = model_class or default_class(weights.config)
    check_expressible(weights.config, model_class)
    if model_class == "llama" and "contiguous" in (qkv, mlp):
        raise CheckpointError(
            "--qkv and --mlp must be interleaved for LlamaForCausalLM, which reads fused rows so, got contiguous; "
            "leave them out"
        )
    layout = WeightLayout(model_class, fused or model_class == "qwen3", qkv, mlp)
    files = files or ("legacy" if model_class == "llama" else "new")
    model, optimizer = _in_layout(weights, layout)
    total = sum(tensor.nbytes for tensor in (*model.values(), *optimizer.values()))
    tell = running_total(progress, total)
    write = _write_legacy if files == "legacy" else _write_new
    with new_folder(destination, weights.tree or weights.path, total) as folder:
        written = write(folder, weights.step, model, optimizer, tell)
        _write_configs(folder, weights.config, layout, seq_length)
    return {
        "source": str(weights.path),
        "destination": str(destination),
        "load_checkpoint": str(destination / written),
        "model_class": model_class,
        "files": files,
        "fused": layout.fused,
        "qkv": layout.qkv if layout.fused else None,
        "mlp": layout.mlp if layout.fused else None,
        "parameters": len(model),
        "optimizer": bool(optimizer),
        "step": weights.step,
        "bytes": total,
    }


def _in_layout(weights: Weights, layout: WeightLayout) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The weights (fp32), and the moments with their counter where there are any, under a class's names."""
    model = to_mindformers({n: cast(t, "F32") for n, t in weights.model.items()}, weights.config, layout)
    moments = {name: tensor for name, tensor in weights.optimizer.items() if name != APPLIED_STEPS}
    optimizer = to_mindformers(moments, weights.config, layout)
    if optimizer:
        # AdamW's bias correction counts by it.
        applied = int(weights.optimizer[APPLIED_STEPS].read())
        optimizer[GLOBAL_STEP] = from_array(GLOBAL_STEP, np.array([applied], np.int32))
    return model, optimizer


def _write_configs(folder: Path, config: DecoderConfig, layout: WeightLayout, seq_length: int) -> None:
    """What `config_beside` finds on the way back."""
    section = {"model": mindformers_section(config, layout, seq_length)}
    (folder / MODEL_YAML).write_text(yaml.safe_dump(section, sort_keys=False), encoding="utf-8")
    text = json.dumps(hugging_face_config(config, seq_length), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _write_legacy(
    folder: Path,
    step: int,
    model: Mapping[str, StoredTensor],
    optimizer: Mapping[str, StoredTensor],
    tell: Callable[[int], None],
) -> str:
    rank = folder / "rank_0"
    rank.mkdir()
    name = f"{PREFIX}_rank_0-1_{step}.safetensors"
    write_safetensors(rank / name, [*model.values(), *optimizer.values()], tell, "ms")
    meta = {"last_epoch": 1, "last_step": step, "last_ckpt_file": name}
    (rank / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return f"rank_0/{name}"


def _write_new(
    folder: Path,
    step: int,
    model: Mapping[str, StoredTensor],
    optimizer: Mapping[str, StoredTensor],
    tell: Callable[[int], None],
) -> str:
    iteration = folder / f"iteration_{step:08d}"
    iteration.mkdir()
    for kind, tensors in (("model", model), ("opt", optimizer)):
        if tensors:
            name = f"{PREFIX}-{kind}-0000000-0000001.safetensors"
            write_safetensors(iteration / name, tensors.values(), tell, "ms")
    # MindFormers refuses any other key.
    common = {
        "epoch_num": 1,
        "step_num": step,
        "global_step": step,
        "loss_scale": None,
        "global_batch_size": None,
        "ckpt_status": None,
    }
    (iteration / "common.json").write_text(json.dumps(common, indent=4), encoding="utf-8")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step), encoding="utf-8")
    return ""
