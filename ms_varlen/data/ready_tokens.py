"""Records that hold token ids already: their `labels` or `loss_mask` as a mask over the tokens.

There is one convention inside: a mask over the ids themselves, shifted once, later, by the layout. Labels in a source
may follow either of two, and shifting those of the second again would train on the token after the next:

    input_ids                5    6    7
    labels, own ids       -100    6    7
    labels, shifted          6    7 -100

They are told apart by their values; the second is refused unless the recipe says ``data.labels_shifted: true``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ms_varlen.errors import DataError

IGNORED = -100
"""A label without loss."""


def tokens_of(fields: Mapping[str, Any], shifted: bool, where: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids of a record and which of them are targets.

    Args:
        fields: `input_ids`, and at most one of `labels` (each the token's id or -100) and `loss_mask` (0 and 1).
        shifted: whether labels name the next token.
        where: the record, for an error.
    Returns:
        [n] int64 and [n] bool; None when all are targets.
    Raises:
        DataError: a field of another type, length or convention.
    """
    ids = _integers(fields["input_ids"], "input_ids", "iu", where)
    given = [field for field in ("labels", "loss_mask") if fields.get(field) is not None]
    if not given:
        return ids, None
    if len(given) > 1:
        raise DataError(f"a record must have 'labels' or 'loss_mask', got both, in {where}; remove one of them")
    field = given[0]
    values = _integers(fields[field], field, "iu" if field == "labels" else "iub", where)
    if values.size != ids.size:
        raise DataError(
            f"field '{field}' must be as long as input_ids ({ids.size}), got {values.size}, in {where}; "
            "mend or remove the record"
        )
    if field == "labels":
        return _of_shifted_labels(ids, values, where) if shifted else (ids, _of_labels(ids, values, where))
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if wrong.size:
        raise _wrong("loss_mask", int(wrong[0]), values, "0 or 1", where)
    return ids, values.astype(bool)


def check_ids(ids: np.ndarray, vocab_size: int, tokenizer: str, where: str) -> None:
    """Refuse ids that a tokenizer does not have.

    Raises:
        DataError: the message names the first.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise DataError(
            f"input_ids[{wrong[0]}] must be from 0 to {vocab_size - 1}, the vocabulary of data.tokenizer "
            f"({tokenizer}), got {ids[wrong[0]]}, in {where}; name the tokenizer that made the ids"
        )


def _of_labels(ids: np.ndarray, labels: np.ndarray, where: str) -> np.ndarray:
    own = (labels == IGNORED) | (labels == ids)
    if own.all():
        return labels != IGNORED
    place = int(np.argmin(own))
    if _are_shifted(ids, labels).all():
        raise DataError(
            f"field 'labels' must name each token's own id or {IGNORED}, got labels that are shifted already (labels["
            f"{place}] is {labels[place]} where input_ids[{place}] is {ids[place]}), in {where}; they would be shifted "
            "twice: set data.labels_shifted=true"
        )
    raise _wrong("labels", place, labels, f"input_ids[{place}] ({ids[place]}) or {IGNORED}", where)


def _of_shifted_labels(ids: np.ndarray, labels: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """A last label other than -100 is a token that the ids do not have:

    ids [5 6 7], labels [-100 7 8]    ->    ids [5 6 7 8], targets [. . x x]
    """
    following = _are_shifted(ids, labels)
    if not following.all():
        if ((labels == IGNORED) | (labels == ids)).all():
            raise DataError(
                f"field 'labels' must name the next token's id under data.labels_shifted, got each token's own, in "
                f"{where}; set data.labels_shifted=false"
            )
        place = int(np.argmin(following))
        raise _wrong("labels", place, labels, f"input_ids[{place + 1}] ({ids[place + 1]}) or {IGNORED}", where)
    last = labels[-1:][labels[-1:] != IGNORED]
    targets = np.concatenate([[False], labels != IGNORED])
    return np.concatenate([ids, last]), targets[: ids.size + last.size]


def _are_shifted(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Where a label, but for the last, is the next token or none."""
    return (labels[:-1] == IGNORED) | (labels[:-1] == ids[1:])


def _wrong(field: str, place: int, values: np.ndarray, rule: str, where: str) -> DataError:
    return DataError(f"{field}[{place}] must be {rule}, got {values[place]}, in {where}; mend or remove the record")


def _integers(value: Any, field: str, kinds: str, where: str) -> np.ndarray:
    """[n] int64 of a list or an array; `kinds` are the NumPy kinds allowed."""
    try:
        array = np.asarray(value) if isinstance(value, list | np.ndarray) else None
    except ValueError:  # lists of several lengths
        array = np.asarray(value, object)
    if array is not None and array.ndim == 1 and (array.dtype.kind in kinds or not array.size):
        return array.astype(np.int64)
    if array is None:
        found = type(value).__name__
    elif array.ndim > 1:
        found = f"an array of {array.ndim} axes"
    else:
        odd = (type(entry).__name__ for entry in value if isinstance(entry, bool) or not isinstance(entry, int))
        found = f"a list with {next(odd, 'an integer beyond 64 bits')}"
    raise DataError(f"field '{field}' must be a list of integers, got {found}, in {where}; mend or remove the record")
