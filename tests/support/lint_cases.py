"""Batches as other frameworks make them, healthy and faulty, by name: (batch, pad id, codes that lint must give)."""

import numpy as np

S, EOS = 64, 2
RNG = np.random.default_rng(0)
STREAM = RNG.integers(5, 200, (4, S + 1))
REAL = [64, 50, 30, 10]
KEPT = (np.arange(S) < np.array(REAL)[:, None]).astype(np.int64)
IDS = np.where(KEPT, STREAM[:, :S], 0)
LABELS = np.where(KEPT, IDS, -100)
ENDS = np.array([20, 45, 64])
FLAT = STREAM[:1, :S]
FLAT_LABELS = np.where(np.isin(np.arange(S), [0, 20, 45]), -100, FLAT)
POSITIONS = np.concatenate([np.arange(20), np.arange(25), np.arange(19)])[None]

Case = tuple[dict[str, np.ndarray], int | None, list[str]]


def _batch(ids, labels, **columns):
    return {"input_ids": np.asarray(ids), "labels": np.asarray(labels)} | {
        name: np.asarray(value) for name, value in columns.items()
    }


def _shifted(ids, ends):
    """Labels that are the next token of the same sample."""
    labels = np.roll(ids, -1, axis=-1)
    labels[..., np.asarray(ends) - 1] = -100
    return labels


def megatron() -> dict[str, Case]:
    """Rows of S tokens out of S + 1: labels reach one token beyond the inputs."""
    inputs, targets = STREAM[:, :-1], STREAM[:, 1:]
    mask = np.ones((1, S), np.float32)
    mask[0, [19, 44]] = 0
    positions = np.tile(np.arange(S), (4, 1))
    padded, padded_labels = IDS[1:], np.where(KEPT[1:], STREAM[1:, 1:], -100)  # the last target is in no input
    crossing = inputs[:1], targets[:1]
    return {
        "pretraining": (_batch(inputs, targets, position_ids=positions), None, []),
        "pretraining, bare": (_batch(inputs, targets), None, []),
        "float32 loss mask": (_batch(inputs, targets, loss_mask=np.ones((4, S), np.float32)), None, []),
        "4-D mask": (_batch(inputs, targets, attention_mask=np.ones((4, 1, S, S), bool)), None, []),
        "packed": (_batch(*crossing, loss_mask=mask, cu_seqlens=np.int32([0, 20, 45, 64])), None, []),
        "packed, [1, n] ends": (_batch(*crossing, loss_mask=mask, cu_seqlens=[[0, 20, 45, 64]]), None, []),
        "packed, targets cross": (_batch(*crossing, cu_seqlens=[0, 20, 45, 64]), None, ["LABEL-BOUNDARY"]),
        "reset positions, targets cross": (_batch(*crossing, position_ids=POSITIONS), None, ["LABEL-BOUNDARY"]),
        "samples cut, then padded": (_batch(padded, padded_labels, attention_mask=KEPT[1:]), None, []),
        "samples cut, then padded, pad id": (_batch(padded, padded_labels), 0, []),
        "all loss masked": (_batch(inputs, targets, loss_mask=np.zeros((4, S), np.float32)), None, ["LABEL-NONE"]),
    }


def padded_rows() -> dict[str, Case]:
    """transformers: labels not shifted, an attention mask or lengths."""
    left, left_kept = np.zeros_like(IDS), KEPT[:, ::-1]
    left[left_kept == 1] = IDS[KEPT == 1]
    left_labels = np.where(left_kept, left, -100)
    left_shifted = np.where(left_kept, np.roll(left_labels, -1, 1), -100)
    left_shifted[:, -1] = -100
    answers = np.where(np.roll(KEPT, -2, 1) * (np.arange(S) < S - 2), -100, LABELS)
    answers[0, -2:] = IDS[0, -2:]
    in_padding = np.where(LABELS == -100, 0, LABELS)
    backwards = REAL[::-1]
    return {
        "mask": (_batch(IDS, LABELS, attention_mask=KEPT), None, []),
        "float mask": (_batch(IDS, LABELS, attention_mask=KEPT.astype(np.float32)), None, []),
        "bool mask": (_batch(IDS, LABELS, attention_mask=KEPT.astype(bool)), 0, []),
        "lengths on two axes": (_batch(IDS, LABELS, lengths=np.array(REAL)[:, None]), 0, []),
        "left padding": (_batch(left, left_labels, attention_mask=left_kept), 0, []),
        "left padding, lengths": (_batch(left, left_labels, attention_mask=left_kept, lengths=REAL), 0, []),
        "left padding, no mask": (_batch(left, left_labels, lengths=REAL), 0, []),
        "left padding, lengths alone": (_batch(left, left_labels, lengths=REAL), None, []),
        "left padding, shifted": (_batch(left, left_shifted, lengths=REAL), None, []),
        "left padding, positions of rows": (
            _batch(left, left_labels, attention_mask=left_kept, position_ids=np.tile(np.arange(S), (4, 1))),
            None,
            [],
        ),
        "left padding, positions of transformers": (
            _batch(
                left,
                left_labels,
                attention_mask=left_kept,
                position_ids=np.where(left_kept, np.cumsum(left_kept, 1) - 1, 1),
            ),
            None,
            [],
        ),
        "answers of one token and eos": (_batch(IDS, answers, attention_mask=KEPT), 0, []),
        "answers of one token and eos, lengths": (_batch(IDS, answers, lengths=REAL), None, []),
        "padding is a target": (_batch(IDS, in_padding, attention_mask=KEPT), None, ["LABEL-PAD"]),
        "padding is a target, pad id": (_batch(IDS, in_padding), 0, ["LABEL-PAD"]),
        "padding is a target, lengths": (_batch(IDS, in_padding, lengths=REAL), None, ["LABEL-PAD"]),
        "other order, mask": (_batch(IDS, LABELS, attention_mask=KEPT, lengths=backwards), None, ["LEN-ORDER"]),
        "other order, pad id": (_batch(IDS, LABELS, lengths=backwards), 0, ["LEN-ORDER"]),
        "a length too few": (_batch(IDS, LABELS, lengths=REAL[:3]), 0, ["LEN-SHAPE"]),
        "a length too few, no pad id": (_batch(IDS, LABELS, lengths=REAL[:3]), None, ["LEN-SHAPE"]),
        "a length one too long, mask": (
            _batch(IDS, LABELS, attention_mask=KEPT, lengths=[64, 51, 30, 10]),
            None,
            ["LEN-WRONG"],
        ),
        "packed sum is not the mask's": (
            _batch(IDS[1:2], LABELS[1:2], attention_mask=KEPT[1:2], lengths=[20, 29]),
            None,
            ["LEN-WRONG"],
        ),
    }


def pad_is_eos() -> dict[str, Case]:
    """The pad id is the end-of-text, and the true one is a target."""
    ids = np.where(np.roll(KEPT, -1, 1) * (np.arange(S) < S - 1), IDS, EOS)
    labels = np.where(KEPT, ids, -100)
    double = np.where(np.roll(KEPT, -2, 1) * (np.arange(S) < S - 2), IDS, EOS)
    double_labels = np.where(KEPT, double, -100)
    turns = np.where(np.arange(S) == 5, EOS, np.where(KEPT, IDS, EOS))
    shifted = np.roll(labels, -1, 1)
    shifted[:, -1] = -100
    return {
        "mask": (_batch(ids, labels, attention_mask=KEPT), EOS, []),
        "shifted": (_batch(ids, shifted, attention_mask=KEPT), EOS, []),
        "no mask": (_batch(ids, labels), EOS, []),
        "no mask, shifted": (_batch(ids, shifted), EOS, []),
        "all places are targets": (_batch(ids, ids, attention_mask=KEPT), EOS, ["LABEL-PAD"]),
        "turns": (_batch(turns, np.where(KEPT, turns, -100), attention_mask=KEPT, lengths=REAL), EOS, []),
        "two at the end": (_batch(double, double_labels, attention_mask=KEPT, lengths=REAL), EOS, []),
        "two at the end, no mask": (_batch(double, double_labels, lengths=REAL), EOS, []),
    }


def flattened() -> dict[str, Case]:
    """transformers' DataCollatorWithFlattening, and packs of one row with running ends."""
    cu = [0, 20, 45, 64]
    short = RNG.integers(5, 200, (1, 8))
    same = np.full((1, S), 7)
    same_unshifted = np.where(np.isin(np.arange(S), [0, 20, 45]), -100, same)
    row, row_labels = FLAT[0], _shifted(FLAT[0], ENDS)
    twice = np.roll(row, -2)
    twice[[18, 19, 43, 44, 62, 63]] = -100
    tail_ids = np.where(np.arange(S) < 54, row, 0)
    tail_labels = np.where(np.arange(S) < 53, row_labels, -100)
    plain = ([10, 20, 34], [16] * 4, [20, 25, 19])
    wrong, crossing = row_labels.copy(), row_labels.copy()
    wrong[7], crossing[19] = 3, row[20]
    return {
        "positions": (_batch(FLAT, FLAT_LABELS, position_ids=POSITIONS), None, []),
        "positions, targets cross": (_batch(FLAT, FLAT, position_ids=POSITIONS), None, ["LABEL-BOUNDARY"]),
        "all positions 0": (_batch(FLAT, FLAT_LABELS, position_ids=np.zeros((1, S), int)), None, ["POS-RESET"]),
        "all positions 1": (_batch(FLAT, FLAT_LABELS, position_ids=np.ones((1, S), int)), None, ["POS-RESET"]),
        "ends": (_batch(FLAT, FLAT_LABELS, position_ids=POSITIONS, cu_seq_lens_q=cu, cu_seq_lens_k=cu), None, []),
        "positions go on": (
            _batch(FLAT, FLAT_LABELS, position_ids=np.arange(S)[None], cu_seq_lens_q=cu),
            None,
            ["POS-RESET"],
        ),
        "other ends of keys": (
            _batch(FLAT, FLAT_LABELS, cu_seq_lens_q=cu, cu_seq_lens_k=[0, 25, 45, 64]),
            None,
            ["LEN-WRONG"],
        ),
        "other kvlen": (
            _batch(row, row_labels, actual_seq_qlen=ENDS, actual_seq_kvlen=[25, 45, 64]),
            None,
            ["LEN-WRONG"],
        ),
        "same kvlen, leading 0": (_batch(row, row_labels, actual_seq_qlen=ENDS, actual_seq_kvlen=cu), None, []),
        "plain ends of keys": (
            _batch(row, row_labels, actual_seq_qlen=ENDS, actual_seq_kvlen=[20, 25, 19]),
            None,
            ["LEN-PLAIN"],
        ),
        **{
            f"plain {lens}": (_batch(FLAT, _shifted(FLAT, np.cumsum(lens)), actual_seq_qlen=lens), None, ["LEN-PLAIN"])
            for lens in plain
        },
        "one sample": (_batch(FLAT, _shifted(FLAT, [S]), actual_seq_qlen=[64]), None, []),
        "shifted": (_batch(row, row_labels, position_ids=POSITIONS[0], actual_seq_qlen=ENDS), None, []),
        "shifted, target crosses": (_batch(row, crossing, actual_seq_qlen=ENDS), None, ["LABEL-BOUNDARY"]),
        "shifted twice": (_batch(row, twice, actual_seq_qlen=ENDS), None, ["LABEL-SHIFT"]),
        "one label wrong": (_batch(row, wrong, actual_seq_qlen=ENDS), None, ["LABEL-WRONG"]),
        "float ends": (_batch(row, row_labels, actual_seq_qlen=ENDS.astype(np.float32)), None, ["LEN-DTYPE"]),
        "ends filled with -1": (_batch(row, row_labels, cu_seqlens=[*cu, -1, -1]), None, []),
        "-1 among ends": (_batch(row, row_labels, cu_seqlens=[0, 20, -1, 64]), None, ["LEN-ZERO"]),
        "nothing but -1": (_batch(row, row_labels, cu_seqlens=[-1, -1]), None, ["LEN-ZERO"]),
        "empty sample": (_batch(row, row_labels, cu_seqlens=[0, 20, 20, 45, 64]), None, ["LEN-ZERO"]),
        "empty first sample": (_batch(row, row_labels, actual_seq_qlen=[0, *cu]), None, ["LEN-ZERO"]),
        "ends too low": (_batch(row, row_labels, actual_seq_qlen=[20, 45, 60]), None, ["LEN-TAIL"]),
        "ends too high": (_batch(row, row_labels, actual_seq_qlen=[20, 45, 70]), None, ["LEN-TAIL"]),
        "tail in the last sample": (_batch(tail_ids, tail_labels, actual_seq_qlen=ENDS), 0, []),
        "no targets": (_batch(row, np.full(S, -100), actual_seq_qlen=ENDS), None, ["LABEL-NONE"]),
        "bool loss mask": (_batch(row, row_labels, loss_mask=row_labels != -100, actual_seq_qlen=ENDS), None, []),
        "one token repeated": (_batch(same, same), None, []),
        "one token repeated, packed": (_batch(same, same_unshifted, actual_seq_qlen=ENDS), None, []),
        "one token repeated, packed, shifted": (_batch(same, _shifted(same, ENDS), actual_seq_qlen=ENDS), None, []),
        "samples of two": (
            _batch(short, np.where(np.arange(8) % 2, short, -100), cu_seqlens=[0, 2, 4, 6, 8]),
            None,
            [],
        ),
        "samples of two, targets cross": (
            _batch(short, short, cu_seqlens=[0, 2, 4, 6, 8]),
            None,
            ["LABEL-BOUNDARY"],
        ),
    }


def packed_rows() -> dict[str, Case]:
    """MindFormers: rows of several samples, ends a row each or on one axis."""
    ids = STREAM[:2, :S]
    labels = np.stack([_shifted(ids[0], ENDS), _shifted(ids[1], [30, 64])])
    ends = {
        "a row each, filled": ([[20, 45, 64, 64], [30, 64, 64, 64]], []),
        "one axis": ([20, 45, 64, 94, 128], []),
        "a row each, rows before added": ([[20, 45, 64, 64], [94, 128, 128, 128]], []),
        "a row each, plain": ([[20, 25, 19], [10, 20, 34]], ["LEN-PLAIN"]),
        "a row for another batch": ([[20, 45, 64]] * 3, ["LEN-SHAPE"]),
        "one axis, counted by row": ([20, 45, 64, 30, 64], ["LEN-WRONG"]),
        "an end in the next row": ([20, 45, 94, 128], ["LEN-WRONG"]),
    }
    return {name: (_batch(ids, labels, actual_seq_len=values), None, codes) for name, (values, codes) in ends.items()}


CASES = {
    f"{group.__name__}: {name}": case
    for group in (megatron, padded_rows, pad_is_eos, flattened, packed_rows)
    for name, case in group().items()
}
