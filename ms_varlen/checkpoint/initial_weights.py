"""What a net begins with instead of random weights: `model.init_from`.

Hugging Face folders and our own checkpoints of any mode hold the same names, so one reader serves both; a checkpoint's
tensors are compared with the checksums of its manifest besides. Names and shapes are checked before anything is read.
"""

import hashlib
from pathlib import Path

import numpy as np

from ms_varlen.checkpoint.store import MANIFEST_FILE, MODEL_FILE, list_checkpoints, read_manifest
from ms_varlen.checkpoint.tensors import TensorFolder
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Old Llama files hold the rotary frequencies, which `config.json` says anyway.
_NO_WEIGHT = "rotary_emb.inv_freq"


class InitialWeights:
    """The weights of a folder, one at a time.

    Args:
        path: a folder of safetensors files with Hugging Face names, or a checkpoint's folder ``step_NNNNNNNN``.
        config: the decoder that they are for, with its `vocab_size` known.
    Raises:
        CheckpointError: the folder cannot be read, or its parameters are not the decoder's; names the first that
            differs.
    """

    def __init__(self, path: str | Path, config: DecoderConfig):
        self._path = Path(path).expanduser()
        self._checksums = _checksums(self._path)
        self._tensors = TensorFolder(self._path)
        self._digests: dict[str, str] = {}
        found = {name: shape for name, shape in self._tensors.shapes.items() if not name.endswith(_NO_WEIGHT)}
        if config.tie_word_embeddings and HEAD in found and EMBEDDING in found:
            self._check_tied()
            del found[HEAD]
        self._compare(found, config.parameter_shapes())

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """One weight, fp32 (host).

        Args:
            name: its Hugging Face name.
            shape: of the parameter that it is for.
        Raises:
            CheckpointError: a checkpoint's tensor is not as its manifest says, or a weight is NaN or infinite.
        """
        value = self._tensors.read(name)
        assert value.shape == tuple(shape), f"{name}: the constructor compared with DecoderConfig.parameter_shapes"
        digest = hashlib.sha256(value.reshape(-1).view(np.uint8).data).hexdigest()
        if self._checksums and digest != self._checksums[name]:
            raise CheckpointError(
                f"{self._tensors.files[name]} is altered: the checksum of parameter {name} does not fit; "
                "begin from another checkpoint",
                "CKPT-CORRUPT",
            )
        self._check_finite(name, value)
        self._digests[name] = digest
        return value

    def _check_finite(self, name: str, value: np.ndarray) -> None:
        if np.isfinite([value.min(), value.max()]).all():  # a NaN is both; needs no array of its own
            return
        places = np.argwhere(~np.isfinite(value))
        first = places[0].tolist()
        raise CheckpointError(
            f"{self._tensors.files[name]}: parameter {name} must be finite, the file holds {value[tuple(first)]} at "
            f"{first} ({len(places)} of {value.size} numbers are NaN or infinite); begin from other weights",
            "CKPT-CORRUPT",
        )

    def record(self) -> dict[str, str]:
        """Where the weights came from, and a hash of those that were read: the same for the same fp32 numbers, however
        they are stored.
        """
        lines = [f"{name} {digest}" for name, digest in sorted(self._digests.items())]
        return {"init_from": str(self._path), "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest()}

    def _check_tied(self) -> None:
        shapes = self._tensors.shapes
        if shapes[HEAD] != shapes[EMBEDDING] or not self._tensors.same(HEAD, EMBEDDING):
            raise CheckpointError(
                f"{self._tensors.files[HEAD]}: parameter {HEAD} must equal {EMBEDDING} or be absent in a tied model, "
                "the file holds other values; set model.config.tie_word_embeddings to false"
            )

    def _compare(self, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
        wrong = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
        if not wrong:
            return
        name = wrong[0]
        file = self._tensors.files.get(name, self._path)

        def say(shape: tuple[int, ...] | None) -> str:
            return "no such parameter" if shape is None else str(list(shape))

        advice = "use the model.config that the weights were made with"
        if name == HEAD and name not in found:
            advice = f"set model.config.tie_word_embeddings to true if {EMBEDDING} is the output weight too"
        raise CheckpointError(
            f"{file}: parameter {name} must be {say(expected.get(name))} for this model, the file holds "
            f"{say(found.get(name))} ({_differences(found, expected)}); {advice}",
            "CKPT-RECIPE",
        )


def _differences(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> str:
    """How many parameters of the model are not in the file, and how many of the file are not the model's."""
    missing, others = len(expected.keys() - found.keys()), len(found.keys() - expected.keys())
    reshaped = sum(found[name] != shape for name, shape in expected.items() if name in found)
    return (
        f"of the model's {len(expected)} parameters {missing} are not in the file and {reshaped} have another shape "
        f"there; {others} in the file are none of the model's"
    )


def _checksums(path: Path) -> dict[str, str]:
    """SHA-256 by name of a checkpoint's weights; nothing for another folder."""
    if (path / MANIFEST_FILE).is_file():
        return {row["name"]: row["sha256"] for row in read_manifest(path)["parameters"][MODEL_FILE]}
    steps = list_checkpoints(path)
    if steps:
        raise CheckpointError(
            f"model.init_from must be one checkpoint, got the run folder {path}; use model.init_from={steps[-1]}"
        )
    return {}
