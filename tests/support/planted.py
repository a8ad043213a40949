"""Faults of the field, planted at the place where people make them; each undone when its context ends.

    with plant("lengths sorted without rows"):
        ...

Faults before the batch check meet the check; those behind it (`attention ends ...`, `mask ...`) reach the operator.
Faults between ranks and of the device lie in `rank_faults`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from ms_varlen.batches import dataset
from ms_varlen.batches import layout as layouts
from ms_varlen.lengths import SeqLens
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.ops import attention
from ms_varlen.ops.reference_attention import pair_columns

Columns = dict[str, np.ndarray]


@contextlib.contextmanager
def changed_columns(change: Callable[[Columns], Columns]) -> Iterator[None]:
    """Change what the layout hands on, as a collate function of one's own would."""
    original = layouts.lay_out

    def changed(*args: Any, **kwargs: Any) -> Columns:
        return change(dict(original(*args, **kwargs)))

    with mock.patch.object(dataset, "lay_out", changed):
        yield


@contextlib.contextmanager
def _ends(change: Callable[[np.ndarray], np.ndarray]) -> Iterator[None]:
    """Change the segment lengths that the attention is told, behind every check: [G] -> [G]."""

    def changed(lens: SeqLens, body: str | None = None) -> Columns:
        told = SeqLens.packed(change(lens.segment_lens), max(lens.tokens, 1))
        columns = {"actual_seq_qlen": told.actual_seq_qlen}
        return columns | (pair_columns(told) if (body or attention.body_in_use()) == "reference" else {})

    with mock.patch("ms_varlen.train.graphs.attention_columns", changed):
        yield


def _without(name: str) -> Callable[[Columns], Columns]:
    return lambda columns: {key: value for key, value in columns.items() if key != name}


def _changed(name: str, change: Callable[[Columns], np.ndarray]) -> Callable[[Columns], Columns]:
    return lambda columns: columns | {name: change(columns)}


def _zeroed(columns: Columns) -> np.ndarray:
    lengths = columns["seq_lens"].copy()
    lengths[0] = 0
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)[1:]


def _merged_tail(columns: Columns) -> np.ndarray:
    """The padded tail as part of the last sample; a batch without one is left as it is."""
    ends, last = columns["actual_seq_qlen"], int(np.cumsum(columns["seq_lens"])[-1])
    kept = ends[ends < last]
    return np.append(kept, ends[-1]).astype(np.int32)


def _across(columns: Columns) -> np.ndarray:
    ids, labels = columns["input_ids"], columns["labels"].copy()
    places = np.flatnonzero(labels[:-1] == IGNORE_INDEX)
    inside = places[places < int(columns["seq_lens"].sum()) - 1]
    labels[inside] = ids[inside + 1]
    return labels


def _pads_as_targets(columns: Columns) -> np.ndarray:
    labels = columns["labels"].copy()
    labels[int(columns["seq_lens"].sum()) :] = columns["input_ids"][int(columns["seq_lens"].sum()) :]
    labels[int(columns["seq_lens"].sum()) - 1] = columns["input_ids"][-1]
    return labels


def _shifted_twice(columns: Columns) -> np.ndarray:
    return np.append(columns["labels"][1:], IGNORE_INDEX).astype(np.int32)


def _swapped_first_two(segments: np.ndarray) -> np.ndarray:
    return np.concatenate([segments[:2][::-1], segments[2:]])


def _rotated_first_three(segments: np.ndarray) -> np.ndarray:
    return np.concatenate([segments[:3][[2, 0, 1]], segments[3:]]) if segments.size > 3 else segments


def _three_late(segments: np.ndarray) -> np.ndarray:
    moved = segments.copy()
    if moved.size > 2 and moved[1] > 3:
        moved[:2] += np.array([3, -3], moved.dtype)
    return moved


def _first_in_two(segments: np.ndarray) -> np.ndarray:
    half = segments[0] // 2
    return np.concatenate([[half, segments[0] - half], segments[1:]]) if half else segments


def _one_late(segments: np.ndarray) -> np.ndarray:
    moved = segments.copy()
    if moved.size > 1 and moved[1] > 1:
        moved[:2] += np.array([1, -1], moved.dtype)
    return moved


def _mask(kind: str) -> contextlib.AbstractContextManager[None]:
    """The plain reference with a wrong mask in place of whichever body is in use; PyNative."""
    from mindspore import Tensor, ops

    def wrong(q_TND: Any, k_TND: Any, v_TND: Any, lengths: tuple) -> Any:
        ends = lengths[0].asnumpy()
        ids = np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
        isolated, causal = ids[:, None] == ids[None, :], np.tri(ids.size, dtype=bool)
        before = isolated | (ids[:, None] - 1 == ids[None, :])
        keep = {
            "inverted": causal.T & isolated,
            "missing": isolated,
            "dense": causal,
            "too far": isolated & np.tri(ids.size, k=1, dtype=bool),
            "too short": isolated & np.tri(ids.size, k=-1, dtype=bool),
            "window": isolated & causal & ~np.tri(ids.size, k=-8, dtype=bool),
            "leak": before & causal,
        }[kind]
        repeats = q_TND.shape[1] // k_TND.shape[1]
        k_TND, v_TND = (ops.repeat_interleave(x, repeats, 1) if repeats > 1 else x for x in (k_TND, v_TND))
        q, k, v = (x.swapaxes(0, 1) for x in (q_TND, k_TND, v_TND))
        scores = ops.matmul(q, k.swapaxes(1, 2)) * q_TND.shape[2] ** -0.5
        scores = scores + Tensor(np.where(keep, 0.0, -1e9).astype(np.float32))
        return ops.matmul(ops.softmax(scores, -1), v).swapaxes(0, 1)

    return _attention(wrong)


def _scaled(factor: float) -> contextlib.AbstractContextManager[None]:
    """Scores that are `factor` times what they must be."""

    def wrong(q_TND: Any, k_TND: Any, v_TND: Any, lengths: tuple) -> Any:
        return attention.varlen_attention(q_TND * factor, k_TND, v_TND, lengths)

    return _attention(wrong)


@contextlib.contextmanager
def _compressed(change: Callable[[np.ndarray], np.ndarray]) -> Iterator[None]:
    """Another compressed mask for the NPU's operator: [2048, 2048] uint8, 1 = discard."""
    from mindspore import Tensor

    from ms_varlen.ops import ascend_attention

    wrong = Tensor(np.ascontiguousarray(change(ascend_attention.CAUSAL_MASK.asnumpy())))
    with mock.patch.object(ascend_attention, "CAUSAL_MASK", wrong):
        yield


@contextlib.contextmanager
def _behind_the_checks(change: Callable[[Columns], Columns]) -> Iterator[None]:
    """Change micro-batches without padded rows after they were checked."""
    original = dataset.MicroBatches.micro_batch

    def changed(self: dataset.MicroBatches, ids: np.ndarray) -> Columns:
        columns = original(self, ids)
        return change(columns) if self._layout.mode == "varlen" else columns

    with mock.patch.object(dataset.MicroBatches, "micro_batch", changed):
        yield


def _another_id(columns: Columns) -> np.ndarray:
    ids = columns["input_ids"].copy()
    ids[5] = (ids[5] + 1) % 250
    return ids


def _not_shifted(columns: Columns) -> np.ndarray:
    return np.where(columns["labels"] == IGNORE_INDEX, IGNORE_INDEX, columns["input_ids"])


def _loss_in_padding(columns: Columns) -> np.ndarray:
    labels = columns["labels"].copy()
    labels[int(columns["seq_lens"].sum()) :] = 0
    return labels


@contextlib.contextmanager
def _attention(wrong: Callable[..., Any]) -> Iterator[None]:
    """Another function in place of `varlen_attention`; PyNative."""
    with mock.patch("ms_varlen.train.graphs.varlen_attention", wrong):
        yield


def _without_key_gradient(q_TND: Any, k_TND: Any, v_TND: Any, lengths: tuple) -> Any:
    from mindspore import ops

    return attention.varlen_attention(q_TND, ops.stop_gradient(k_TND), v_TND, lengths)


def _nan_at_the_end(q_TND: Any, k_TND: Any, v_TND: Any, lengths: tuple) -> Any:
    """The last place of T, which is padding in most batches, is NaN."""
    from mindspore import Tensor

    factor = np.ones((q_TND.shape[0], 1, 1), np.float32)
    factor[-1] = np.nan
    return attention.varlen_attention(q_TND, k_TND, v_TND, lengths) * Tensor(factor)


def _no_target(columns: Columns) -> np.ndarray:
    labels = columns["labels"].copy()
    labels[3] = IGNORE_INDEX
    return labels


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that can be planted.

    Attributes:
        name: in words.
        code: of the catalogue; what a check must say.
        plant: a context in which it holds.
        found_by: "check" (before anything is computed: the always-on batch check, or the masks' of `align`) or "align".
    """

    name: str
    code: str
    plant: Callable[[], contextlib.AbstractContextManager[None]]
    found_by: str = "check"


def _collate(name: str, code: str, change: Callable[[Columns], Columns]) -> Fault:
    return Fault(name, code, lambda: changed_columns(change))


FAULTS = (
    _collate("collate drops the lengths", "LEN-LOST", _without("seq_lens")),
    _collate("collate drops the ends", "LEN-LOST", _without("actual_seq_qlen")),
    _collate("float lengths", "LEN-DTYPE", _changed("seq_lens", lambda c: c["seq_lens"].astype(np.float32))),
    _collate("int64 ends", "LEN-DTYPE", _changed("actual_seq_qlen", lambda c: c["actual_seq_qlen"].astype(np.int64))),
    _collate("lengths sorted without rows", "LEN-ORDER", _changed("seq_lens", lambda c: np.sort(c["seq_lens"])[::-1])),
    _collate("rows shuffled without lengths", "LEN-ORDER", _changed("input_ids", lambda c: np.roll(c["input_ids"], 7))),
    _collate("one length a token short", "LEN-WRONG", _changed("seq_lens", lambda c: c["seq_lens"] - 1)),
    _collate("a zero length among the ends", "LEN-PLAIN", _changed("actual_seq_qlen", _zeroed)),
    _collate("plain lengths as ends", "LEN-PLAIN", _changed("actual_seq_qlen", lambda c: c["seq_lens"])),
    _collate(
        "ends without the tail",
        "LEN-TAIL",
        _changed("actual_seq_qlen", lambda c: np.cumsum(c["seq_lens"], dtype=np.int32)),
    ),
    _collate("tail merged into the last sequence", "LEN-TAIL", _changed("actual_seq_qlen", _merged_tail)),
    _collate(
        "positions not reset",
        "POS-RESET",
        _changed("position_ids", lambda c: np.arange(c["input_ids"].size, dtype=np.int32)),
    ),
    _collate("labels across a boundary", "LABEL-BOUNDARY", _changed("labels", _across)),
    _collate("pad as target", "LABEL-PAD", _changed("labels", _pads_as_targets)),
    _collate("labels shifted twice", "LABEL-SHIFT", _changed("labels", _shifted_twice)),
    Fault("compressed mask upside down", "MASK-INVERTED", lambda: _compressed(np.transpose)),
    Fault("compressed mask that keeps what it must discard", "MASK-INVERTED", lambda: _compressed(lambda m: 1 - m)),
    Fault("compressed mask one too far", "MASK-WRONG", lambda: _compressed(lambda m: np.triu(m, 2))),
    Fault("attention ends sorted", "LEN-ORDER", lambda: _ends(np.sort), "align"),
    Fault("attention ends of the first two samples swapped", "LEN-ORDER", lambda: _ends(_swapped_first_two), "align"),
    Fault("attention end a token late", "LEN-WRONG", lambda: _ends(_one_late), "align"),
    Fault("attention ignores the lengths", "MASK-DENSE", lambda: _mask("dense"), "align"),
    Fault("causal mask missing", "MASK-INVERTED", lambda: _mask("missing"), "align"),
    Fault("mask inverted", "MASK-INVERTED", lambda: _mask("inverted"), "align"),
    Fault("attention ends of three samples rotated", "LEN-ORDER", lambda: _ends(_rotated_first_three), "align"),
    Fault("attention end three tokens late", "LEN-WRONG", lambda: _ends(_three_late), "align"),
    Fault("an end inside the first sample", "LEN-WRONG", lambda: _ends(_first_in_two), "align"),
    Fault("causal mask one too far", "MASK-WRONG", lambda: _mask("too far"), "align"),
    Fault("causal mask one short", "MASK-WRONG", lambda: _mask("too short"), "align"),
    Fault("sliding window", "MASK-WRONG", lambda: _mask("window"), "align"),
    Fault("samples see the one before", "MASK-DENSE", lambda: _mask("leak"), "align"),
    Fault("scores scaled by 1.5", "LOSS-DIFFERS", lambda: _scaled(1.5), "align"),
    Fault("another id", "DATA-TOKENS", lambda: _behind_the_checks(_changed("input_ids", _another_id)), "align"),
    Fault("a target dropped", "LABEL-WRONG", lambda: _behind_the_checks(_changed("labels", _no_target)), "align"),
    Fault("labels not shifted", "LABEL-SHIFT", lambda: _behind_the_checks(_changed("labels", _not_shifted)), "align"),
    Fault("loss in padding", "LABEL-PAD", lambda: _behind_the_checks(_changed("labels", _loss_in_padding)), "align"),
    Fault("keys without a gradient", "LOSS-DIFFERS", lambda: _attention(_without_key_gradient), "align"),
    Fault("NaN in the padding", "LOSS-NAN", lambda: _attention(_nan_at_the_end), "align"),
)
"""What can be planted in the data path and the attention; the rest of the chapter is about whole recipes."""


def plant(name: str) -> contextlib.AbstractContextManager[None]:
    """The context of a fault, by its name."""
    return next(fault for fault in FAULTS if fault.name == name).plant()
