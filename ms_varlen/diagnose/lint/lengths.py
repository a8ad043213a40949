"""Running ends and plain lengths of a batch: wrong in themselves, or against each other or its rows. Pure NumPy."""

from collections.abc import Iterator, Mapping

import numpy as np

from ms_varlen.diagnose.lint.columns import Finding, Rows, Segments

ENDS = ("actual_seq_qlen", "actual_seq_len", "actual_seq_lengths", "cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
KEY_ENDS = ("actual_seq_kvlen", "cu_seq_lens_k", "cu_seqlens_k", "cu_seqlens_kv")
LENGTHS = ("seq_lens", "lengths", "seq_length", "length")


def read_lengths(batch: Mapping[str, np.ndarray], rows: Rows) -> tuple[list[Finding], list[Segments] | None]:
    """What is wrong with the lengths, and the samples of each row; None where they are wrong or there are none."""
    ends, keys, lengths = (_named(batch, names) for names in (ENDS, KEY_ENDS, LENGTHS))
    findings: list[Finding] = []
    row_ends = None
    if ends:
        row_ends = _row_ends(*ends, rows.ids.shape)
        findings += [row_ends] if isinstance(row_ends, Finding) else _key_findings(ends[0], row_ends, keys, rows)
    if lengths:
        by_row = ends is None and (rows.ids.shape[0] > 1 or lengths[1].size == 1)
        findings += _plain_findings(*lengths, rows, by_row)
    if findings or not (ends or lengths):
        return findings, None
    flat = lengths[1].reshape(-1).astype(np.int64) if lengths else None
    if row_ends is not None and not isinstance(row_ends, Finding):
        only = flat if rows.ids.shape[0] == 1 else None
        return [], [_samples(rows, row, _between(part), only) for row, part in enumerate(row_ends)]
    assert flat is not None
    if rows.ids.shape[0] == 1 < flat.size:
        first = 0 if rows.kept is None else int(np.argmax(rows.kept[0]))
        return [], [[(first + start, first + end) for start, end in _between(np.cumsum(flat))]]
    return [], [[_placed(rows, row, int(length))] for row, length in enumerate(flat)] + [[]] * (
        rows.ids.shape[0] - flat.size
    )


def _named(batch: Mapping[str, np.ndarray], names: tuple[str, ...]) -> tuple[str, np.ndarray] | None:
    return next(((name, np.asarray(batch[name])) for name in names if name in batch), None)


def _between(ends: np.ndarray) -> Segments:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if ends.size else []


def _row_ends(name: str, values: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray] | Finding:
    """Running ends of each row from its start, without a leading 0 and filler; or what is wrong with them."""
    count, width = shape
    if values.dtype.kind not in "iu":
        return Finding("LEN-DTYPE", f"{name} must be integers (int32), got {values.dtype}; convert where it is made")
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[0] != count):
        return Finding(
            "LEN-SHAPE",
            f"{name} must have one axis, or a row for each of {count} rows, got shape {values.shape}; carry ends so",
        )
    values = values.astype(np.int64)
    if values.ndim == 2:
        parts = [
            _running(f"{name}[{row}]", _from_row_start(part, row, width), width) for row, part in enumerate(values)
        ]
        wrong = next((part for part in parts if isinstance(part, Finding)), None)
        return wrong or [part for part in parts if not isinstance(part, Finding)]
    whole = _by_row_finding(name, values, count, width) or _running(name, values, count * width)
    if isinstance(whole, Finding):
        return whole
    return [whole[(whole > at) & (whole <= at + width)] - at for at in range(0, count * width, width)]


def _from_row_start(part: np.ndarray, row: int, width: int) -> np.ndarray:
    """Ends without the tokens of the rows before them, where those were added (MindFormers)."""
    if part.size and part.max() % width == 0:
        offset = int(part.max()) - width
        if 0 < offset <= row * width and (part >= offset).all():
            return part - offset
    return part


def _by_row_finding(name: str, ends: np.ndarray, count: int, width: int) -> Finding | None:
    """Ends on one axis that do not fit the rows: counted from 0 in each, or reaching from one row into the next."""
    back = np.flatnonzero(np.diff(ends) < 0)
    if count > 1 and back.size == count - 1 and (ends[back] == width).all() and ends[-1] == width:
        i = int(back[0]) + 1
        return Finding(
            "LEN-WRONG",
            f"{name}[{i}] must be above the end before it ({width}), got {int(ends[i])}, counted from the start of a "
            "row; add the tokens of the rows before it, or give the ends of each row a row",
        )
    if back.size or ends.size == 0 or ends[-1] != count * width:
        return None
    missing = [edge for edge in range(width, count * width, width) if edge not in ends]
    if missing:
        over = int(ends[ends > missing[0]][0])
        return Finding(
            "LEN-WRONG",
            f"{name} must hold the end of each row ({missing[0]} too), got an end at {over} of a sample that begins in "
            f"the row before; end samples with their row, rows are {width} tokens",
        )
    return None


def _running(where: str, part: np.ndarray, tokens: int) -> np.ndarray | Finding:
    """Ends up to `tokens`, without a leading 0 and filler (the last end again, or -1); or what is wrong with them."""
    part = part[: int(np.flatnonzero(part != -1)[-1]) + 1] if (part != -1).any() else part[:0]
    if part.size == 0 or part.min() < 0:
        return Finding("LEN-ZERO", f"{where} must hold ends >= 0, got {part[:8].tolist()}; count lengths on the tokens")
    steps = np.diff(part)
    back = np.flatnonzero((steps < 0) | ((steps == 0) & (part[1:] != part.max())))
    if part[0] and part.sum() == tokens != part[-1]:
        return Finding(
            "LEN-PLAIN",
            f"{where} must hold running ends up to {tokens}, got {part[:8].tolist()}, whose sum that is; TND attention "
            "takes running ends, not plain lengths",
        )
    if back.size:
        i = int(back[0]) + 1
        return Finding(
            "LEN-ZERO" if (steps >= 0).all() else "LEN-PLAIN",
            f"{where}[{i}] must be above the end before it ({int(part[i - 1])}), got {int(part[i])}; TND attention "
            "takes running ends, not plain lengths, and no empty sequence",
        )
    if part[-1] != tokens:
        return Finding(
            "LEN-TAIL",
            f"{where}: the last end must be the number of tokens ({tokens}), got {int(part[-1])}; give a padded "
            "tail segments of its own",
        )
    return np.unique(part[part > 0])


def _key_findings(
    name: str, ends: list[np.ndarray], keys: tuple[str, np.ndarray] | None, rows: Rows
) -> Iterator[Finding]:
    """Ends of keys that are wrong, or not those of the queries: each sample attends to itself alone."""
    if keys is None:
        return
    found = _row_ends(*keys, rows.ids.shape)
    if isinstance(found, Finding):
        yield found
        return
    for row, (expected, part) in enumerate(zip(ends, found, strict=True)):
        if not np.array_equal(expected, part):
            yield Finding(
                "LEN-WRONG",
                f"{keys[0]} must have the ends of {name} ({expected[:8].tolist()} in row {row}), got "
                f"{part[:8].tolist()}; give both the same ends",
            )
            return


def _plain_findings(name: str, lengths: np.ndarray, rows: Rows, by_row: bool) -> Iterator[Finding]:
    if lengths.size == 0:
        yield Finding("LEN-SHAPE", f"{name} must have a length for each sample, got none; carry them with the tokens")
        return
    if lengths.dtype.kind not in "iu":
        yield Finding("LEN-DTYPE", f"{name} must be integers (int32), got {lengths.dtype}; convert where they are made")
        return
    flat = lengths.reshape(-1).astype(np.int64)
    if (flat < 1).any():
        i = int(np.argmax(flat < 1))
        yield Finding("LEN-ZERO", f"{name}[{i}] must be >= 1, got {int(flat[i])}; remove empty samples before batching")
    elif by_row:
        yield from _row_length_findings(name, flat, rows)
    else:
        exact = rows.kept is not None
        most = rows.ids.size if rows.kept is None else int(rows.kept.sum())
        total = sum(flat.tolist())  # lengths that are none would overflow int64
        if total > most or (exact and total != most):
            yield Finding(
                "LEN-WRONG",
                f"{name} must sum to {'' if exact else 'at most '}{most} tokens, got {total}; count lengths "
                "after cutting",
            )


def _row_length_findings(name: str, flat: np.ndarray, rows: Rows) -> Iterator[Finding]:
    count, width = rows.ids.shape
    if flat.size > count or flat.max() > width or not all(_is_empty(rows, row) for row in range(flat.size, count)):
        yield Finding(
            "LEN-SHAPE",
            f"{name} must have a length of at most {width} for each of {count} rows, got {flat.size} up to "
            f"{int(flat.max())}; carry one length per row",
        )
        return
    allowed = [_allowed_lengths(rows, row) for row in range(flat.size)]
    wrong = [i for i, (least, most) in enumerate(allowed) if not least <= flat[i] <= most]
    if wrong:
        i = wrong[0]
        least = np.sort([low for low, _ in allowed])
        most = np.sort([high for _, high in allowed])
        swapped = bool(((least <= np.sort(flat)) & (np.sort(flat) <= most)).all())
        yield Finding(
            "LEN-ORDER" if swapped else "LEN-WRONG",
            f"{name}[{i}] must be the tokens of row {i} without its padding ({allowed[i][0]}), got {int(flat[i])}; "
            + ("lengths and rows are in different orders" if swapped else "count lengths on the rows that are sent"),
        )


def _is_empty(rows: Rows, row: int) -> bool:
    """Whether a row without a length may be: a row that fills up a batch."""
    if rows.kept is None and rows.pad_id is None:
        return rows.supervised is None or not rows.supervised[row].any()
    return rows.real(row, 0, rows.ids.shape[1]) is None


def _allowed_lengths(rows: Rows, row: int) -> tuple[int, int]:
    """The least and most that the length of a row may be."""
    width = rows.ids.shape[1]
    if rows.kept is None and rows.pad_id is None:
        return 1, width
    start, end = rows.real(row, 0, width) or (0, 0)
    if rows.kept is not None:
        return end - start, end - start
    if start:  # padding on the left, or a first token that has its id
        return end - start, (width - start if end == width else max(width - start, end)) + 1
    # A sample may end with the pad id itself (a model whose end-of-text it is); targets tell of more than one.
    most = end + 1
    if rows.supervised is not None and rows.supervised[row].any():
        most = max(most, int(np.flatnonzero(rows.supervised[row])[-1]) + 2)
    return end, min(most, width)


def _placed(rows: Rows, row: int, length: int) -> tuple[int, int]:
    """Where the one sample of a row lies: after its padding, or before it."""
    width = rows.ids.shape[1]
    if rows.kept is not None:
        start = int(np.argmax(rows.kept[row]))
        return start, start + length
    before = width - length
    if rows.pad_id is not None:
        left = bool((rows.ids[row, :before] == rows.pad_id).all())
        sure = rows.ids[row, -1] != rows.pad_id
    else:
        left, sure = True, False
    if left and not sure:  # targets tell: they end behind where a sample at the left would
        at = np.zeros(0, int) if rows.supervised is None else np.flatnonzero(rows.supervised[row])
        left = bool(at.size and at[-1] >= length and at[0] >= before - 1)
    start = before if left else 0
    return start, start + length


def _samples(rows: Rows, row: int, segments: Segments, lengths: np.ndarray | None) -> Segments:
    """Segments without padding: by the lengths of samples where each has one, else by mask or pad id."""
    if lengths is not None and rows.kept is None:
        spans = [(start, rows.real(row, start, end), end) for start, end in segments]
        full = [(start, real, end) for start, real, end in spans if real is not None]
        if len(full) == lengths.size and all(
            (rows.pad_id is None or real[1] <= start + length) and start + length <= end
            for (start, real, end), length in zip(full, lengths.tolist(), strict=True)
        ):
            return [(start, start + n) for (start, _, _), n in zip(full, lengths.tolist(), strict=True)]
    found = [rows.sample(row, start, end) for start, end in segments]
    return [part for part in found if part is not None]
