"""What a path is, and its weights, whatever wrote it."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import yaml

from ckpt_tools.gguf import open_gguf
from ckpt_tools.mindformers.checkpoints import open_mindformers
from ckpt_tools.mindformers.config import read_config
from ckpt_tools.mindformers.names import RowLayout, model_class_of
from ckpt_tools.mindformers.shards import TRACKER, read_file
from ckpt_tools.step_folder import open_step
from ckpt_tools.weights import Weights, checked, is_hugging_face, of_step, open_hugging_face
from ms_varlen.checkpoint.resume import RECIPE_FILE
from ms_varlen.checkpoint.store import MANIFEST_FILE, list_checkpoints, read_manifest
from ms_varlen.checkpoint.tensors import StoredTensor
from ms_varlen.errors import CheckpointError
from ms_varlen.models.hugging_face import CONFIG_FILE

DEFAULT_POSITIONS = 2048
"""For weights that nobody says it of."""

Kind = Literal["ms_varlen", "hugging_face", "mindformers", "gguf", "file"]


@dataclasses.dataclass(frozen=True)
class ReadingHints:
    """What a checkpoint does not say about itself; see `open_mindformers`."""

    config: Path | None = None
    qkv: RowLayout | None = None
    mlp: RowLayout | None = None
    strategy: Path | None = None


def kind_of(path: Path) -> Kind:
    """What a path is: "file" is a plain `.safetensors` or `.ckpt`.

    Raises:
        CheckpointError: nothing that is known here; says what was looked for.
    """
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return "gguf"
        if path.suffix in (".safetensors", ".ckpt"):
            return "file"
    elif path.is_dir():
        name = path.resolve().name  # of what a link means, or "."
        if (path / MANIFEST_FILE).exists() or name.startswith("step_") or list_checkpoints(path):
            return "ms_varlen"
        if is_hugging_face(path):
            return "hugging_face"
        if (path / TRACKER).exists() or name.startswith("iteration_"):
            return "mindformers"
        if (
            any(path.glob("rank_*/*"))
            or (path / "checkpoint").is_dir()
            or any(path.glob("*.ckpt"))
            or any(path.glob("*.safetensors"))
        ):
            return "mindformers"
    what = "a file or folder that is there" if not path.exists() else "a checkpoint"
    raise CheckpointError(
        f"{path} must be {what}: a step or run folder of ms_varlen, a Hugging Face folder ({CONFIG_FILE} and "
        "safetensors), a folder of MindFormers, a .safetensors, .ckpt or .gguf file; correct the path"
    )


def open_weights(path: Path, hints: ReadingHints = ReadingHints()) -> Weights:
    """The weights of any checkpoint, checked against its decoder's config.

    Raises:
        CheckpointError: not found, damaged, or not what its config says; RecipeError: of no family here.
    """
    kind = kind_of(path)
    if kind == "ms_varlen":
        return of_step(open_step(path), path)
    if kind == "hugging_face":
        return open_hugging_face(path)
    if kind == "gguf":
        return open_gguf(path)
    if kind == "file":
        tensors = read_file(path)
        if model_class_of(tensors) is None:
            return _plain_file(path, tensors, hints.config)
    return open_mindformers(path, hints.config, hints.qkv, hints.mlp, hints.strategy)


def _plain_file(path: Path, tensors: dict[str, StoredTensor], config: Path | None) -> Weights:
    """A file with Hugging Face names."""
    place = config or path.parent / CONFIG_FILE
    if not place.exists():
        raise CheckpointError(f"{path} does not say its model and there is no {place}; give --config")
    return checked(path, "hugging_face", read_config(place)[0], tensors, {})


def stored_dtype(weights: Weights) -> str:
    """The safetensors dtype that the weights came in, where they were imported; else their own."""
    if weights.kind == "ms_varlen":
        imported = read_manifest(weights.path).get("imported_from")
        return imported["dtype"] if imported else "F32"
    return weights.dtype


def positions_of(weights: Weights) -> int:
    """The positions that a model was made for: its own limit, else the run's."""
    if weights.config.max_position_embeddings is not None:
        return weights.config.max_position_embeddings
    found = _run_recipe(weights).get("model", {}).get("max_position_embeddings")
    if isinstance(found, int):
        return found
    if weights.kind == "ms_varlen":
        return read_manifest(weights.path)["seq_length"] or DEFAULT_POSITIONS
    return DEFAULT_POSITIONS


def tokenizer_of(weights: Weights) -> Path | None:
    """The tokenizer's files of a run: its recipe's `data.tokenizer`, where it is a file or folder that is there."""
    place = Path(str(_run_recipe(weights).get("data", {}).get("tokenizer"))).expanduser()
    return place if place.exists() else None


def _run_recipe(weights: Weights) -> dict[str, dict[str, Any]]:
    """Sections of the recipe next to one of our checkpoints, as training wrote them; empty if there is none.

    Not checked: the files that it names need not be where a checkpoint is exported.
    """
    path = weights.path.parent / RECIPE_FILE
    if weights.kind != "ms_varlen" or not path.exists():
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        values = str(error).splitlines()[0]
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold the run's recipe, found {values!r}; bring the file back, or remove it")
    return {section: entry for section, entry in values.items() if isinstance(entry, dict)}
