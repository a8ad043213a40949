"""Batches of any loader, looked at from outside: lengths, positions, labels and padding that contradict each other.

A batch is a mapping of arrays. `input_ids` is [T], or [B, S] for rows; `labels` has its shape; and any of

- `actual_seq_qlen` (also `actual_seq_len`, `cu_seqlens`, `cu_seq_lens_q`): running ends, with or without a leading 0,
  on one axis for the whole batch or a row each (with or without the tokens of the rows before); repeats of the last
  end (MindFormers) and -1 behind it are filler. `actual_seq_kvlen`, `cu_seq_lens_k`: those of the keys, which must be
  the same;
- `seq_lens` (also `lengths`): plain lengths;
- `position_ids`: where nothing else tells, samples begin where they are 0;
- `attention_mask` (not 0 = no padding), `loss_mask` (not 0 = the label counts), of any dtype.

Padding is known from the mask; without one from the lengths, at last from the pad id.

Labels may be shifted already (`labels[t]` is the token after t) or not (`labels[t]` is the token at t, which the model
shifts): the one that fits the batch better is taken, and said. Shifted labels at the end of a row are not judged: their
token need not be in the batch (rows cut from S + 1 tokens). Pure NumPy; a few ms for 4,096 tokens.
"""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from ms_varlen.diagnose.lint.columns import Finding, Rows, Segments, read_rows
from ms_varlen.diagnose.lint.lengths import read_lengths
from ms_varlen.limits import IGNORE_INDEX

MOSTLY = 0.5
"""Labels are shifted twice where more than this share of them is the second token ahead."""


def lint_batch(batch: Mapping[str, np.ndarray], pad_id: int | None = None) -> list[Finding]:
    """What is wrong with one batch, most telling first; nothing where all is well.

    Args:
        batch: arrays by name, see above.
        pad_id: the id that padding has; without it padding is known from the mask and the lengths alone.
    Raises:
        DataError: there is no `input_ids`, or a column of another shape or dtype.
    """
    rows = read_rows(batch, pad_id)
    if _mask_is_inverted(rows):
        return [
            Finding(
                "MASK-INVERTED",
                "attention_mask must be 1 for tokens and 0 for padding, got 1 for padding alone; give the mask the "
                "other way round",
            )
        ]
    findings, segments = read_lengths(batch, rows)
    if rows.positions is not None and not findings:
        if segments is None:
            findings += _lone_position_findings(rows, rows.positions)
            segments = _restarts(rows, rows.positions) if not findings else None
        else:
            findings += _position_findings(rows.positions, segments)
    if segments is None:  # wrong lengths say nothing about labels; the rows still do
        whole = [rows.sample(row, 0, rows.ids.shape[1]) for row in range(rows.ids.shape[0])]
        segments = [[part] if part else [] for part in whole]
    if rows.labels is not None and rows.supervised is not None:
        findings += _label_findings(rows, rows.labels, rows.supervised, segments)
    return findings


def _mask_is_inverted(rows: Rows) -> bool:
    """Whether targets, or the pad id, lie exactly where the mask says that they must not."""
    if rows.kept is None:
        return False
    if rows.supervised is not None and rows.supervised.any() and not rows.kept.all():
        return not (rows.supervised & rows.kept).any()
    is_pad = rows.ids == rows.pad_id
    return bool(rows.kept.any() and is_pad.any() and np.array_equal(rows.kept, is_pad) and not is_pad.all())


def _restarts(rows: Rows, positions: np.ndarray) -> list[Segments]:
    """The samples of each row where only positions tell."""
    segments = []
    for row in range(rows.ids.shape[0]):
        start, end = rows.sample(row, 0, rows.ids.shape[1]) or (0, 0)
        edges = [start, *(start + 1 + np.flatnonzero(positions[row, start + 1 : end] == 0)).tolist(), end]
        segments.append(list(itertools.pairwise(edges)) if end else [])
    return segments


def _lone_position_findings(rows: Rows, positions: np.ndarray) -> list[Finding]:
    """Positions that neither continue by one nor restart, where no lengths say where samples begin.

    Padding may have any: without a mask or a pad id, only what lies between targets is judged.
    """
    for row in range(rows.ids.shape[0]):
        start, end = rows.real(row, 0, rows.ids.shape[1]) or (0, 0)
        if rows.supervised is not None:
            at = np.flatnonzero(rows.supervised[row])
            if not at.size:
                continue
            if rows.kept is None and rows.pad_id is None:
                start, end = int(at[0]), int(at[-1]) + 1
        found = positions[row, start:end].astype(np.int64)
        steps = np.diff(found)
        wrong = np.flatnonzero((steps != 1) & ((found[1:] != 0) | (not found.any())))
        if wrong.size:
            i = int(wrong[0]) + 1
            return [
                Finding(
                    "POS-RESET",
                    f"position_ids[{row}, {start + i}] must be {int(found[i - 1]) + 1}, or 0 at the start of a sample, "
                    f"got {int(found[i])}{'' if found.any() else ' as everywhere'}; count positions from the start of "
                    "each sample",
                )
            ]
    return []


def _position_findings(positions: np.ndarray, segments: list[Segments]) -> list[Finding]:
    for row, parts in enumerate(segments):
        for start, end in parts:
            # A row that begins with padding may count from its padding: only differences matter to the model.
            first = start if len(parts) == 1 and positions[row, start] == start else 0
            wrong = np.flatnonzero(positions[row, start:end] != first + np.arange(end - start))
            if wrong.size:
                at = start + int(wrong[0])
                return [
                    Finding(
                        "POS-RESET",
                        f"position_ids[{row}, {at}] must be {first + at - start}, counted from the start of its "
                        f"sample, got {int(positions[row, at])}; restart positions with each sample",
                    )
                ]
    return []


def _label_findings(
    rows: Rows, labels: np.ndarray, supervised: np.ndarray, segments: list[Segments]
) -> Iterator[Finding]:
    if not supervised.any():
        yield Finding(
            "LABEL-NONE", "labels must have a target, got none in the whole batch; keep the answers when cutting"
        )
        return
    no_ids = np.argwhere(supervised & (labels < 0))
    if no_ids.size:
        row, at = no_ids[0].tolist()
        yield Finding(
            "LABEL-WRONG",
            f"labels[{row}, {at}] must be a token id, or {IGNORE_INDEX} where there is no target, got "
            f"{int(labels[row, at])} ({len(no_ids)} such places); write {IGNORE_INDEX}, or dump the loss_mask too",
        )
        supervised = supervised & (labels >= 0)
    shift = _shift(rows, labels, supervised, segments)
    if shift == 2:
        yield Finding(
            "LABEL-SHIFT",
            "labels[t] must be the token at t (the model shifts) or after it, got the second after it in most places; "
            "shift once",
        )
        return
    inside = rows.kept
    if inside is None:
        inside = np.zeros(rows.ids.shape, bool)
        for row, parts in enumerate(segments):
            for start, end in parts:
                inside[row, start:end] = True
    edges = _crossing(rows.ids, labels, supervised, segments, shift)
    if shift == 1:
        into_padding = [(row, at) for row, at in edges if not inside[row, at + 1]]
        edges = [edge for edge in edges if edge not in into_padding]
    else:
        into_padding = []
    yield from _padding_findings(labels, supervised & ~inside, into_padding)
    if edges:
        row, at = edges[0]
        yield Finding(
            "LABEL-BOUNDARY",
            f"labels[{row}, {at}] must be {IGNORE_INDEX} ({'end' if shift else 'start'} of a sample), got "
            f"{int(labels[row, at])}; its target lies in another sample",
        )
    yield from _target_findings(rows, labels, supervised, segments, shift)


def _shift(rows: Rows, labels: np.ndarray, supervised: np.ndarray, segments: list[Segments]) -> int:
    """0, 1 or 2: how far ahead the labels lie, by what fits most of the places that can be compared."""
    fits = []
    for shift in range(3):
        hits = total = 0
        for row, parts in enumerate(segments):
            for start, end in parts:
                at = _comparable(rows, supervised, row, (start, end), shift)
                hits += int((labels[row, at] == rows.ids[row, at + shift]).sum())
                total += at.size
        fits.append(hits / total if total else 0.0)
    if fits[2] > max(*fits[:2], MOSTLY):
        return 2
    if fits[0] != fits[1]:
        return int(fits[1] > fits[0])
    # A text of one repeated token: unsupervised places lie at the ends of samples, or at their starts.
    faults = [len(_crossing(rows.ids, labels, supervised, segments, shift)) for shift in range(2)]
    return int(faults[1] <= faults[0])  # ours, where nothing tells


def _comparable(rows: Rows, supervised: np.ndarray, row: int, part: tuple[int, int], shift: int) -> np.ndarray:
    """Supervised places of a sample whose target lies `shift` places ahead in the same sample."""
    start, end = part
    at = np.arange(start, end - shift)
    at = at[supervised[row, at]]
    if rows.kept is None and rows.ids[row, end - 1] == rows.pad_id:  # may be padding, see `Rows.sample`
        at = at[at + shift != end - 1]
    return at


def _crossing(
    ids: np.ndarray, labels: np.ndarray, supervised: np.ndarray, segments: list[Segments], shift: int
) -> list[tuple[int, int]]:
    """(row, place) of labels that lie across an edge inside a row: from a sample to what follows it.

    A shifted label counts where it is the token that follows; another one can be the sample's own last token, which
    was cut off its inputs. A label that is not shifted counts at the start of a sample that is not the row's first.
    """
    found = []
    for row, parts in enumerate(segments):
        for start, end in parts if shift else parts[1:]:
            at = end - 1 if shift else start
            if supervised[row, at] and (not shift or (end < ids.shape[1] and labels[row, at] == ids[row, end])):
                found.append((row, at))
    return found


def _padding_findings(labels: np.ndarray, outside: np.ndarray, edges: list[tuple[int, int]]) -> Iterator[Finding]:
    places = sorted([*edges, *zip(*(values.tolist() for values in np.nonzero(outside)), strict=True)])
    if places:
        row, at = places[0]
        yield Finding(
            "LABEL-PAD",
            f"labels[{row}, {at}] must be {IGNORE_INDEX} where there is padding, got {int(labels[row, at])} "
            f"({len(places)} such places); padding is no target",
        )


def _target_findings(
    rows: Rows, labels: np.ndarray, supervised: np.ndarray, segments: list[Segments], shift: int
) -> Iterator[Finding]:
    """The first target that is not the token it should be."""
    for row, parts in enumerate(segments):
        for start, end in parts:
            at = _comparable(rows, supervised, row, (start, end), shift)
            wrong = at[labels[row, at] != rows.ids[row, at + shift]]
            if wrong.size:
                yield Finding(
                    "LABEL-WRONG",
                    f"labels[{row}, {int(wrong[0])}] must be {int(rows.ids[row, wrong[0] + shift])}, the "
                    f"{'next token' if shift else 'token'} of its sample, got {int(labels[row, wrong[0]])}; derive "
                    "labels from the tokens once",
                )
                return
