"""The samples that an epoch has trained, and those that remain for a plan with other settings.

A place in one plan has no meaning in another, so a change of mode, budget or world size carries over the set of samples
itself, one bit each. The rest is planned like any corpus: each sample is trained exactly once in an epoch, even if the
settings change often.
"""

import base64
import binascii
import dataclasses
import hashlib
import zlib

import numpy as np

from ms_varlen.errors import CheckpointError, DataError


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedSet:
    """The samples of a corpus that an epoch has trained. Immutable; begin with `none`.

    Attributes:
        samples: number of samples in the corpus.
        lengths_fingerprint: a hash of the corpus's lengths; ids mean nothing in another corpus.
        bits: [ceil(samples / 8)] uint8, sample 0 in the highest bit of the first byte; the bits after the last are 0.
    """

    samples: int
    lengths_fingerprint: str
    bits: np.ndarray

    @classmethod
    def none(cls, samples: int, lengths_fingerprint: str) -> "TrainedSet":
        """The empty set."""
        return cls(samples, lengths_fingerprint, np.zeros(-(-samples // 8), np.uint8))

    def with_ids(self, ids: np.ndarray) -> "TrainedSet":
        """The set with more samples added, those of steps that a plan of the remainder has done.

        Args:
            ids: [m] ints, sample ids.
        Raises:
            DataError: an id outside the corpus, or one that is trained already; the message gives it.
        """
        _check_ids(ids, self.samples)
        mask = self._mask()
        repeated = mask[ids]
        mask[ids] = True
        if repeated.any() or np.count_nonzero(mask) != self.count + ids.size:
            again = ids[repeated] if repeated.any() else ids[np.bincount(ids, minlength=self.samples)[ids] > 1]
            raise DataError(
                f"sample {int(again[0])} must be trained at most once an epoch, got it again; add only the steps of a "
                "plan that was made from remaining_ids"
            )
        return dataclasses.replace(self, bits=np.packbits(mask))

    @property
    def count(self) -> int:
        """Number of trained samples."""
        return int(np.count_nonzero(self._mask()))

    @property
    def fingerprint(self) -> str:
        """A hash of the corpus and the bits."""
        head = f"{self.samples} {self.lengths_fingerprint} ".encode()
        return hashlib.sha256(head + self.bits.tobytes()).hexdigest()[:32]

    def remaining_ids(self) -> np.ndarray:
        """[samples - count] int64, the samples not trained yet, ascending."""
        return np.flatnonzero(~self._mask())

    def trained_ids(self) -> np.ndarray:
        """[count] int64, the trained samples, ascending."""
        return np.flatnonzero(self._mask())

    def to_dict(self) -> dict:
        """The set as JSON values; `bits` is base64 of zlib."""
        return {
            "samples": self.samples,
            "lengths_fingerprint": self.lengths_fingerprint,
            "trained": self.count,
            "bits": base64.b64encode(zlib.compress(self.bits.tobytes())).decode("ascii"),
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_dict(cls, values: dict, lengths_fingerprint: str) -> "TrainedSet":
        """Read a saved set.

        Args:
            values: from `to_dict`.
            lengths_fingerprint: of the corpus in use.
        Raises:
            CheckpointError: the set is damaged, or belongs to another corpus.
        """
        if values["lengths_fingerprint"] != lengths_fingerprint:
            raise CheckpointError(
                f"plan.trained.lengths_fingerprint must be {lengths_fingerprint} (this corpus), the checkpoint has "
                f"{values['lengths_fingerprint']}; resume with the corpus it was written with",
                "CKPT-RECIPE",
            )
        try:
            raw = zlib.decompress(base64.b64decode(values["bits"], validate=True))
        except (binascii.Error, zlib.error) as error:
            raise CheckpointError(
                f"plan.trained.bits must be base64 of zlib, got other bytes ({error}); resume from another checkpoint",
                "CKPT-CORRUPT",
            ) from error
        trained = cls(values["samples"], lengths_fingerprint, np.frombuffer(raw, np.uint8))
        # Compare the hash first: damaged bits cannot be counted.
        if trained.fingerprint != values["fingerprint"]:
            raise CheckpointError(
                f"plan.trained.fingerprint must match its bits ({trained.fingerprint}), the checkpoint has "
                f"{values['fingerprint']}; the set is damaged, resume from another checkpoint",
                "CKPT-CORRUPT",
            )
        return trained

    def _mask(self) -> np.ndarray:
        """[samples] bool, True for trained samples."""
        return np.unpackbits(self.bits, count=self.samples).view(bool)


def original_ids(order: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    """Translate a plan of the remaining samples to ids of the corpus.

    Args:
        order: places in `remaining`, as a plan over ``lengths[remaining]`` orders them.
        remaining: [m] ids, ascending; see `TrainedSet.remaining_ids`.
    Returns:
        ids of the corpus, in the order of the plan.
    Raises:
        DataError: a place outside `remaining`; the plan belongs to another set.
    """
    _check_ids(order, remaining.size)
    return remaining[order]


def _check_ids(ids: np.ndarray, samples: int) -> None:
    outside = (ids < 0) | (ids >= samples)
    if outside.any():
        i = int(np.argmax(outside))
        raise DataError(
            f"ids[{i}] must be from 0 to {samples - 1}, got {int(ids[i])}; make the plan from remaining_ids of the set"
        )
