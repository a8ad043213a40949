"""A decoder's weights from anywhere, under their Hugging Face names and checked against its config."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ckpt_tools.parameters import check_parameters, moment_shapes, without_buffers
from ckpt_tools.step_folder import CARRIED_FOLDER, StepFolder, tree_of
from ms_varlen.checkpoint.store import APPLIED_STEPS
from ms_varlen.checkpoint.tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    from_array,
    read_safetensors,
    weight_files,
)
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig
from ms_varlen.models.hugging_face import CONFIG_FILE, load_config

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Weights:
    """What any checkpoint holds.

    Attributes:
        path: where it lies.
        kind: "ms_varlen", "hugging_face", "mindformers" or "gguf".
        config: the decoder.
        model: weights by Hugging Face name.
        optimizer: `adam_m.<name>`, `adam_v.<name>` and `applied_steps`; empty where there are none.
        step: optimizer steps done; 0 where nobody says.
        buffers: names of tensors that were left out, since the model makes its own.
        carried: a folder with a tokenizer's files, or None.
        tree: the folder that nothing is written into, where it is larger than `path`.
    """

    path: Path
    kind: str
    config: DecoderConfig
    model: dict[str, StoredTensor]
    optimizer: dict[str, StoredTensor]
    step: int = 0
    buffers: list[str] = dataclasses.field(default_factory=list)
    carried: Path | None = None
    tree: Path | None = None

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.optimizer.values()))

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the weights; the widest where they differ."""
        return max((tensor.dtype for tensor in self.model.values()), key=("BF16", "F16", "F32", "F64").index)


def of_step(step: StepFolder, named: Path) -> Weights:
    """The weights of one of our checkpoints; `named` is the path that it was found by."""
    carried = step.path / CARRIED_FOLDER
    return Weights(
        step.path,
        "ms_varlen",
        step.config,
        step.model,
        step.optimizer,
        step.manifest["step"],
        carried=carried if carried.is_dir() else None,
        tree=tree_of(step, named),
    )


def checked(
    path: Path,
    kind: str,
    config: DecoderConfig,
    model: Mapping[str, StoredTensor],
    optimizer: Mapping[str, StoredTensor],
    step: int = 0,
    carried: Path | None = None,
) -> Weights:
    """Weights under Hugging Face names as `Weights`, when they are just what the config asks for.

    Args:
        optimizer: moments under the names of their weights, without the step counter, which is `step`.
    Raises:
        CheckpointError: a parameter or a moment is missing, extra, of another shape or dtype.
    """
    model, buffers = without_buffers(model, str(path))
    if config.tie_word_embeddings and HEAD in model:
        model = _without_tied_head(path, model)
    shapes = config.parameter_shapes()
    check_parameters(model, shapes, str(path), "use the config that the weights were made with")
    if optimizer:
        check_parameters(
            optimizer, moment_shapes(shapes), str(path), "bring the optimizer's state whole, or none of it"
        )
        optimizer = {**optimizer, APPLIED_STEPS: from_array(APPLIED_STEPS, np.array(step, np.int64))}
    return Weights(path, kind, config, dict(model), dict(optimizer), step, buffers, carried)


def _without_tied_head(path: Path, model: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Some files hold a tied head a second time; it must be the same."""
    if EMBEDDING not in model or model[HEAD].sha256() != model[EMBEDDING].sha256():
        raise CheckpointError(
            f"{path}: parameter {HEAD} must equal {EMBEDDING}, since the config says tie_word_embeddings, found other "
            "values; set tie_word_embeddings to false in the config"
        )
    return {name: tensor for name, tensor in model.items() if name != HEAD}


def open_hugging_face(folder: Path) -> Weights:
    """The weights in a Hugging Face folder: `config.json` and safetensors files, sharded or not.

    Raises:
        RecipeError: the config is of no family here; CheckpointError: the weights are not whole, or not its.
    """
    config = load_config(folder)
    return checked(folder, "hugging_face", config, hugging_face_tensors(folder), {}, carried=folder)


def hugging_face_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of `model.safetensors`, or of the shards that the index names.

    Raises:
        CheckpointError: no such files, or the index and the shards disagree.
    """
    found: dict[str, StoredTensor] = {}
    for file, names in weight_files(folder).items():
        tensors = read_safetensors(file)
        for name in sorted(tensors.keys() if names is None else tensors.keys() | set(names)):
            if name not in tensors:
                raise CheckpointError(
                    f"{file}: parameter {name} is missing, the index {INDEX_FILE} has it there; take another copy"
                )
            if names is not None and name not in names:
                raise CheckpointError(
                    f"{file}: parameter {name} is one too many, the index {INDEX_FILE} does not have it there; take "
                    "another copy"
                )
        found |= tensors
    return found


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder has a `config.json` and weights under the names that transformers gives them."""
    return (folder / CONFIG_FILE).exists() and ((folder / SINGLE_FILE).exists() or (folder / INDEX_FILE).exists())
