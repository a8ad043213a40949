"""The batch check: a micro-batch holds exactly the stored samples that it claims to hold."""

from collections.abc import Mapping

import numpy as np

from ms_varlen.batches.micro_batch import COLUMNS
from ms_varlen.errors import DataError, LengthsError
from ms_varlen.lengths import check_ends
from ms_varlen.limits import IGNORE_INDEX


def require_columns(columns: Mapping[str, np.ndarray], names: tuple[str, ...] = COLUMNS) -> None:
    """Refuse a micro-batch that lost a column on its way.

    Raises:
        DataError: the message names what is missing.
    """
    missing = [name for name in names if name not in columns]
    if missing:
        raise DataError(
            f"a micro-batch must carry {', '.join(missing)}, got only {', '.join(columns)}; keep the lengths' columns "
            "when projecting or mapping the data set: nothing recovers them from ids",
            "LEN-LOST",
        )


def check_micro_batch(
    columns: Mapping[str, np.ndarray],
    starts: np.ndarray,
    lengths: np.ndarray,
    edges: np.ndarray,
    seq_length: int,
    whole_rows: bool = False,
) -> None:
    """Compare a micro-batch with the samples that it claims to hold. Costs O(B), and two looks at the labels.

    Args:
        columns: the columns `COLUMNS`.
        starts: [B] ints, where on T the layout put each sample.
        lengths: [B] ints, the samples' lengths by id, in the order of the plan.
        edges: [2, B] ints, the samples' first and last token ids.
        seq_length: the longest segment allowed, in tokens.
        whole_rows: a sample's segment reaches the end of its padded row; otherwise it ends with the sample.
    Raises:
        DataError: a column is missing.
        LengthsError: dtype, sum, order, ends, size or labels disagree; the message gives the place.
    """
    require_columns(columns)
    for name in COLUMNS:
        if columns[name].dtype != np.int32:
            raise LengthsError(
                f"{name} must be int32, got {columns[name].dtype}; convert where it is made", "LEN-DTYPE"
            )
    tokens = columns["input_ids"].size
    for name in COLUMNS[1:3]:
        if columns[name].shape != (tokens,):
            raise LengthsError(
                f"{name} must be as long as input_ids ({tokens}), got shape {columns[name].shape}; make both from the "
                "same lengths",
                "LEN-SHAPE",
            )
    check_ends(columns["actual_seq_qlen"], tokens, seq_length)
    seq_lens = columns["seq_lens"]
    if seq_lens.shape != lengths.shape:
        raise LengthsError(
            f"seq_lens must have one entry per sample ({lengths.size}), got shape {seq_lens.shape}; carry one length "
            "per sample",
            "LEN-SHAPE",
        )
    moved = np.array_equal(np.sort(seq_lens), np.sort(lengths))
    code = "LEN-ZERO" if (seq_lens < 1).any() else "LEN-ORDER" if moved else "LEN-WRONG"
    _refuse_first("seq_lens", seq_lens, lengths, "the sample's length in the store", code)
    _check_samples(columns, starts, edges, whole_rows)


def _check_samples(columns: Mapping[str, np.ndarray], starts: np.ndarray, edges: np.ndarray, whole_rows: bool) -> None:
    """Each sample starts a segment; its first and last id, last label and last position are where its length says."""
    ids, seq_lens, ends = columns["input_ids"], columns["seq_lens"], columns["actual_seq_qlen"]
    segment_starts = np.concatenate([[0], ends[:-1]])
    segments = np.minimum(np.searchsorted(segment_starts, starts), segment_starts.size - 1)
    found = segment_starts[segments]
    _refuse_first("start of sample", found, starts, "where a segment of actual_seq_qlen starts", "LEN-TAIL")
    if not whole_rows:
        _refuse_first("end of sample", ends[segments], starts + seq_lens, "the end of its segment", "LEN-TAIL")
    lasts = starts + seq_lens - 1
    if lasts.max() >= ids.size:
        raise LengthsError(
            f"seq_lens must end within {ids.size} tokens, got an end at {int(lasts.max()) + 1}; count lengths "
            "after cutting",
            "LEN-WRONG",
        )
    in_store = "the sample's id at this place in the store; are the lengths in the order of the samples?"
    _refuse_first("first id of sample", ids[starts], edges[0], in_store, "LEN-ORDER")
    _refuse_first("last id of sample", ids[lasts], edges[1], in_store, "LEN-ORDER")
    _check_labels(columns, starts)
    _refuse_first(
        "last label of sample",
        columns["labels"][lasts],
        np.full(lasts.size, IGNORE_INDEX),
        "no target",
        "LABEL-BOUNDARY",
    )
    _refuse_first(
        "last position of sample", columns["position_ids"][lasts], seq_lens - 1, "its length - 1", "POS-RESET"
    )


def _check_labels(columns: Mapping[str, np.ndarray], starts: np.ndarray) -> None:
    """No target lies outside the samples, and each is the token after it."""
    ids, labels = columns["input_ids"], columns["labels"]
    supervised = labels != IGNORE_INDEX
    wrong = np.flatnonzero(supervised[:-1] & (labels[:-1] != ids[1:]))
    before = np.concatenate([[0], np.cumsum(supervised, dtype=np.int64)])
    inside = before[starts + columns["seq_lens"]] - before[starts]
    outside = int(before[-1] - inside.sum())
    shifted = bool(wrong.size) and (_are(labels, ids, supervised, 0) or _are(labels, ids, supervised, 2))
    if outside and not shifted:
        raise LengthsError(
            f"labels must be {IGNORE_INDEX} in padding, got {outside} targets outside the samples; padding is no "
            "target",
            "LABEL-PAD",
        )
    if wrong.size:
        i = int(wrong[0])
        raise LengthsError(
            f"labels[{i}] must be the token after it ({int(ids[i + 1])}), got {int(labels[i])}; {wrong.size} differ; "
            "shift labels once, inside a sample",
            "LABEL-SHIFT" if shifted else "LABEL-WRONG",
        )


def _are(labels: np.ndarray, ids: np.ndarray, supervised: np.ndarray, shift: int) -> bool:
    """Whether each target is the token `shift` places on."""
    end = ids.size - shift
    return bool((labels[:end] == ids[shift:])[supervised[:end]].all())


def _refuse_first(name: str, found: np.ndarray, expected: np.ndarray, rule: str, code: str) -> None:
    wrong = found != expected
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LengthsError(
            f"{name}[{i}] must be {int(expected[i])} ({rule}), got {int(found[i])}; "
            f"{int(wrong.sum())} of {wrong.size} differ; take tokens, labels and lengths by sample id, in one order",
            code,
        )
