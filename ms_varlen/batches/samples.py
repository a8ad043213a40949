"""The interface of samples that a data set reads, and samples in memory."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ms_varlen.errors import DataError


class Samples(Protocol):
    """Samples, numbered from 0."""

    @property
    def lengths(self) -> np.ndarray:
        """[n] int32, tokens per sample."""

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Return [sum of their lengths] int32 (host), the tokens of the samples `ids` [k], one sample after another."""

    def gather_supervised(self, ids: np.ndarray) -> np.ndarray | None:
        """Return [sum of their lengths] bool (host), which of these tokens are targets; None: all."""


class ArraySamples:
    """Samples in memory.

    Args:
        samples: a [length] array of token ids for each sample.
        supervised: a [length] array of bools for each, which of its tokens are targets; None: all.
    Attributes:
        lengths: [n] int32, tokens per sample.
    Raises:
        DataError: a sample is empty, or not integers on one axis, or its `supervised` is of another length.
    """

    def __init__(self, samples: Sequence[np.ndarray], supervised: Sequence[np.ndarray] | None = None):
        self._samples = [np.asarray(sample) for sample in samples]
        for i, sample in enumerate(self._samples):
            if sample.ndim != 1 or sample.size == 0 or sample.dtype.kind not in "iu":
                raise DataError(
                    f"samples[{i}] must be token ids (integers) on one axis, at least one, got {sample.dtype} of shape "
                    f"{sample.shape}; remove empty samples and convert where they are made"
                )
        self.lengths = np.array([sample.size for sample in self._samples], np.int32)
        self._supervised = None if supervised is None else [np.asarray(mask, bool) for mask in supervised]
        shapes = [sample.shape for sample in self._samples]
        masks = shapes if self._supervised is None else [mask.shape for mask in self._supervised]
        if masks != shapes:
            i = next((i for i, pair in enumerate(zip(masks, shapes, strict=False)) if pair[0] != pair[1]), len(shapes))
            raise DataError(f"supervised[{i}] must have one entry per token of samples[{i}]; give each sample its own")

    def gather(self, ids: np.ndarray) -> np.ndarray:
        """Return [sum of their lengths] int32 (host), the tokens of the samples `ids` [k], one sample after another."""
        return np.concatenate([self._samples[i] for i in ids]).astype(np.int32)

    def gather_supervised(self, ids: np.ndarray) -> np.ndarray | None:
        """Return [sum of their lengths] bool (host), which of these tokens are targets; None: all."""
        return None if self._supervised is None else np.concatenate([self._supervised[i] for i in ids])
