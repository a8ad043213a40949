"""The columns of a batch that some loader made, as rows: ids, labels, padding, positions. Pure NumPy."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ms_varlen.errors import DataError
from ms_varlen.limits import IGNORE_INDEX

Segments = list[tuple[int, int]]
"""(start, end) of each sample of a row, padding left out."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something wrong with a batch.

    Attributes:
        code: of the catalogue.
        text: name, rule, value found, where, next step.
    """

    code: str
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """A batch as rows; columns that it does not have are None.

    Attributes:
        ids: [B, S] ints.
        labels: [B, S] ints.
        supervised: [B, S] bool, labels that count.
        kept: [B, S] bool, tokens that are no padding.
        positions: [B, S] ints.
        pad_id: the id that padding has; None if that is not known.
    """

    ids: np.ndarray
    labels: np.ndarray | None
    supervised: np.ndarray | None
    kept: np.ndarray | None
    positions: np.ndarray | None
    pad_id: int | None

    def real(self, row: int, start: int, end: int) -> tuple[int, int] | None:
        """The part of [start, end) from its first real token to its last; None if all is padding.

        The mask tells; without one the pad id. All is real where neither is known.
        """
        if self.kept is not None:
            at = np.flatnonzero(self.kept[row, start:end])
        elif self.pad_id is not None:
            at = np.flatnonzero(self.ids[row, start:end] != self.pad_id)
        else:
            return start, end
        return (start + int(at[0]), start + int(at[-1]) + 1) if at.size else None

    def sample(self, row: int, start: int, end: int) -> tuple[int, int] | None:
        """The sample in [start, end): as `real`, but where the pad id tells, one of that id on either side may be the
        sample's own (a model whose end-of-text it is).
        """
        found = self.real(row, start, end)
        if self.kept is not None or self.pad_id is None:
            return found
        if found is None:
            return (start, end) if end - start == 1 else None
        left = found[0] > start and found[1] == end  # padding on the left
        return max(found[0] - 1, start) if left else start, min(found[1] + 1, end)


def read_rows(batch: Mapping[str, np.ndarray], pad_id: int | None) -> Rows:
    """The token columns of a batch.

    Raises:
        DataError: there is no `input_ids`, none in it, or a column of another shape or dtype.
    """
    ids = _column(batch, "input_ids", "iub")
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    labels = _like(batch, "labels", ids) if "labels" in batch else None
    supervised = None
    if labels is not None:
        supervised = labels != IGNORE_INDEX
        if "loss_mask" in batch:
            supervised &= _like(batch, "loss_mask", ids, "iubf") != 0
    # A mask of queries by keys ([B, 1, S, S] in Megatron) does not tell padding.
    kept = None
    if "attention_mask" in batch and np.ndim(batch["attention_mask"]) in (1, 2):
        kept = _like(batch, "attention_mask", ids, "iubf") != 0
    positions = _like(batch, "position_ids", ids) if "position_ids" in batch else None
    return Rows(ids, labels, supervised, kept, positions, pad_id)


def _column(batch: Mapping[str, np.ndarray], name: str, kinds: str) -> np.ndarray:
    if name not in batch:
        raise DataError(
            f"a batch must have the column {name}, got {', '.join(batch) or 'none'}; dump it too (see --how)",
            "LEN-LOST",
        )
    array = np.asarray(batch[name])
    if array.size == 0:
        raise DataError(f"{name} must hold a token, got shape {array.shape}; leave empty batches out")
    if array.ndim not in (1, 2) or array.dtype.kind not in kinds:
        what = "numbers" if "f" in kinds else "integers"
        raise DataError(
            f"{name} must be {what} on one or two axes, got {array.dtype} of shape {array.shape}; dump it so"
        )
    return array


def _like(batch: Mapping[str, np.ndarray], name: str, ids: np.ndarray, kinds: str = "iub") -> np.ndarray:
    array = _column(batch, name, kinds)
    if array.size != ids.size:
        raise DataError(f"{name} must be as large as input_ids ({ids.size}), got shape {array.shape}; dump it so")
    return array.reshape(ids.shape)
