"""A record: one entry of a source, and the fields that are read of it."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

PADDING_FIELD = "attention_mask"
LOSS_FIELDS = ("labels", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask")
MASK_FIELDS = (PADDING_FIELD, *LOSS_FIELDS)
"""Fields next to `input_ids` that decide which tokens have a loss."""
KINDS = {"messages": ("messages",), "tokens": ("input_ids",), "completion": ("prompt", "completion"), "text": ("text",)}
"""The fields of a record of each kind, in the order in which kinds are tried."""
FIELDS = (*(field for fields in KINDS.values() for field in fields), *MASK_FIELDS, "tools")
"""Every field that is read."""

MASK_LIKE = re.compile("mask|label", re.IGNORECASE)
MASK_LIKE_LISTS = re.compile("loss|target|weight", re.IGNORECASE)
"""Names of per-token values; a single number of such a name is a score of the record, say."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One entry of a source, and its place.

    Attributes:
        fields: by name; a plain text has one, ``text``.
        where: the place for an error message, e.g. ``corpus.jsonl line 3``.
        done: share of the source that was read so far, 0 to 1.
        unread: further fields, which nothing reads.
    """

    fields: dict[str, Any]
    where: str
    done: float
    unread: tuple[str, ...] = ()


def masks_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the `MASK_FIELDS` that a record has; tables fill missing ones with null."""
    return tuple(field for field in MASK_FIELDS if fields.get(field) is not None)


def mask_like(names: Iterable[str]) -> list[str]:
    """Return the names that may mean a mask or labels, but are none of `MASK_FIELDS`."""
    return [
        name for name in names if name not in MASK_FIELDS and (MASK_LIKE.search(name) or MASK_LIKE_LISTS.search(name))
    ]
