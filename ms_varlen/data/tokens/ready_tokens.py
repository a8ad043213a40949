"""Records that hold token ids already: which ids are the sample, and which of them have a loss.

    attention_mask                                               1 for the sample, 0 for the padding around it
    labels                                                       each token's own id, or -100 for no loss
    loss_mask, completion_mask, assistant_masks, assistant_mask  1 for a loss, 0 for none

A field of another name that looks like one of these is refused: what it says would be lost.

There is one convention inside: a mask over the ids themselves, shifted once, later, by the layout. Labels in a source
may follow either of two, and shifting those of the second again would train on the token after the next:

    input_ids                5    6    7
    labels, own ids       -100    6    7
    labels, shifted          6    7 -100

They are told apart by their values; the second is refused unless the recipe says ``data.labels_shifted: true``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ms_varlen.data.sources.record import MASK_FIELDS, MASK_LIKE, PADDING_FIELD, mask_like, masks_of
from ms_varlen.errors import DataError
from ms_varlen.limits import IGNORE_INDEX

LARGEST = np.iinfo(np.int64).max


def check_masks(fields: Mapping[str, Any], masks: Iterable[str]) -> None:
    """Refuse a record whose masks are not those of the source's first record, or of a name that is not known.

    Args:
        fields: of the record.
        masks: the fields of `MASK_FIELDS` that the first record has.
    Raises:
        DataError: the message names the field.
    """
    for name in mask_like(fields):
        value = fields[name]
        if value is not None and (MASK_LIKE.search(name) or isinstance(value, list | np.ndarray)):
            raise DataError(
                f"a mask or labels next to input_ids must be called {', '.join(MASK_FIELDS)}, got field '{name}'; "
                "rename the field, or remove it if it says nothing about the loss"
            )
    given, expected = set(masks_of(fields)), set(masks)
    for name in MASK_FIELDS:
        if name in expected - given:
            found = "null" if name in fields else "none"
            raise DataError(
                f"field '{name}' must be there in every record of a source whose first has it, got {found}; "
                "a mixture would learn all of this one: add the field, or part the source"
            )
        if name in given - expected:
            raise DataError(
                f"field '{name}' must be left out in a source whose first record has none, got one; add it "
                "to every record (a mixture would learn all of those without), or part the source"
            )


def tokens_of(fields: Mapping[str, Any], shifted: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids of a record and which of them are targets.

    Args:
        fields: `input_ids`, and any of `MASK_FIELDS`; what says where the loss is must agree.
        shifted: whether labels name the next token.
    Returns:
        [n] int64 and [n] bool; None when all are targets.
    Raises:
        DataError: a field of another type, length or convention.
    """
    ids = _integers(fields["input_ids"], "input_ids", "iu")
    given = masks_of(fields)
    if shifted and "labels" not in given:
        raise DataError("field 'labels' must be there under data.labels_shifted, got none; leave that out")
    values = {field: _beside(ids, fields[field], field) for field in given}
    if PADDING_FIELD in values:
        sample = _unpadded(values.pop(PADDING_FIELD))
        ids, values = ids[sample], {field: array[sample] for field, array in values.items()}
    found = None
    for field, array in values.items():
        if field != "labels":
            read = ids, array.astype(bool)
        else:
            read = _of_shifted_labels(ids, array) if shifted else (ids, _of_labels(ids, array))
        # The first token is never a target, whatever is said of it.
        if found is not None and not np.array_equal(found[1][1:], read[1][1:]):
            raise DataError(
                f"fields that say where the loss is must agree, got others in '{field}' than in "
                f"'{next(iter(values))}'; remove one of them"
            )
        found = found or read
    return found or (ids, None)


def target_key(ids: np.ndarray, supervised: np.ndarray | None) -> bytes:
    """What a sample teaches, as bytes: equal ones are equal samples, however their masks were written.

    Args:
        ids: [n] int32.
        supervised: [n] bool; None when all are targets. The first token never is one.
    """
    if supervised is None or supervised[1:].all():
        return ids.tobytes()
    # As an id "mask" lies beyond every vocabulary, so that no ids alone begin so.
    return b"mask" + ids.tobytes() + np.packbits(supervised[1:]).tobytes()


def check_ids(ids: np.ndarray, vocab_size: int, tokenizer: str) -> None:
    """Refuse ids that a tokenizer does not have.

    Raises:
        DataError: the message names the first.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise DataError(
            f"input_ids[{wrong[0]}] must be from 0 to {vocab_size - 1}, the vocabulary of data.tokenizer "
            f"({tokenizer}), got {ids[wrong[0]]}; name the tokenizer that made the ids"
        )


def _beside(ids: np.ndarray, value: Any, field: str) -> np.ndarray:
    """[n] int64, labels or zeros and ones next to ids of [n]."""
    values = _integers(value, field, "iu" if field == "labels" else "iub")
    if values.size != ids.size:
        raise DataError(
            f"field '{field}' must be as long as input_ids ({ids.size}), got {values.size}; fix or remove the record"
        )
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if field != "labels" and wrong.size:
        raise _wrong(field, int(wrong[0]), values, "0 or 1")
    return values


def _unpadded(mask: np.ndarray) -> slice:
    """The places of a sample between its padding."""
    real = np.flatnonzero(mask)
    if not real.size:
        return slice(0, 0)
    first, end = int(real[0]), int(real[-1]) + 1
    if real.size < end - first:
        place = first + int(np.argmin(mask[first:end]))
        raise DataError(
            f"{PADDING_FIELD}[{place}] must be 1 between tokens of the sample, got 0; padding lies before "
            "or after a sample: fix the record, or mask the loss with loss_mask"
        )
    return slice(first, end)


def _of_labels(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    own = (labels == IGNORE_INDEX) | (labels == ids)
    if own.all():
        return labels != IGNORE_INDEX
    place = int(np.argmin(own))
    if _are_shifted(ids, labels).all():
        raise DataError(
            f"field 'labels' must name each token's own id or {IGNORE_INDEX}, got labels that are shifted already "
            f"(labels[{place}] is {labels[place]} where input_ids[{place}] is {ids[place]}); they would "
            "be shifted twice: set data.labels_shifted=true"
        )
    raise _wrong("labels", place, labels, f"input_ids[{place}] ({ids[place]}) or {IGNORE_INDEX}")


def _of_shifted_labels(ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A last label other than -100 is a token that the ids do not have:

    ids [5 6 7], labels [-100 7 8]    ->    ids [5 6 7 8], targets [. . x x]
    """
    following = _are_shifted(ids, labels)
    if not following.all():
        if ((labels == IGNORE_INDEX) | (labels == ids)).all():
            raise DataError(
                "field 'labels' must name the next token's id under data.labels_shifted, got each token's own; "
                "set data.labels_shifted=false"
            )
        place = int(np.argmin(following))
        raise _wrong("labels", place, labels, f"input_ids[{place + 1}] ({ids[place + 1]}) or {IGNORE_INDEX}")
    last = labels[-1:][labels[-1:] != IGNORE_INDEX]
    targets = np.concatenate([[False], labels != IGNORE_INDEX])
    return np.concatenate([ids, last]), targets[: ids.size + last.size]


def _are_shifted(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Where a label, but for the last, is the next token or none."""
    return (labels[:-1] == IGNORE_INDEX) | (labels[:-1] == ids[1:])


def _wrong(field: str, place: int, values: np.ndarray, rule: str) -> DataError:
    return DataError(f"{field}[{place}] must be {rule}, got {values[place]}; fix or remove the record")


def _integers(value: Any, field: str, kinds: str) -> np.ndarray:
    """[n] int64 of a list or an array; `kinds` are the NumPy kinds allowed."""
    try:
        array = np.asarray(value) if isinstance(value, list | np.ndarray) else None
    except ValueError:  # lists of several lengths
        array = np.asarray(value, object)
    # NumPy takes True for 1 among integers.
    odd_bool = "b" not in kinds and isinstance(value, list) and bool in set(map(type, value))
    if array is not None and array.ndim == 1 and (array.dtype.kind in kinds or not array.size) and not odd_bool:
        if array.dtype == np.uint64 and array.size and array.max() > LARGEST:
            raise _wrong(field, int(np.argmax(array > LARGEST)), array, f"at most {LARGEST}")
        return array.astype(np.int64)
    if array is None:
        found = type(value).__name__
    elif array.ndim > 1:
        found = f"an array of {array.ndim} axes"
    else:
        odd = (type(entry).__name__ for entry in value if isinstance(entry, bool) or not isinstance(entry, int))
        found = f"a list with {next(odd, 'an integer beyond 64 bits')}"
    raise DataError(f"field '{field}' must be a list of integers, got {found}; fix or remove the record")
