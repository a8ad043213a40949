"""Names what a wrong attention did: its output is compared with what each known fault would give. Pure NumPy."""

from collections.abc import Iterator, Sequence

import numpy as np

TOLERANCE = 1e-4
MOST_TOKENS = 2048
"""Tokens of a batch that hypotheses are tried on; T x T scores are held for one of them at a time."""


def name_attention_fault(
    q_TND: np.ndarray,
    k_TND: np.ndarray,
    v_TND: np.ndarray,
    out_TND: np.ndarray,
    ends: np.ndarray,
    starts: np.ndarray,
    lengths: Sequence[int],
) -> tuple[str, str]:
    """The catalogue's code for an attention output that is wrong, and the fault in words.

    Args:
        q_TND, k_TND, v_TND, out_TND: [T, N or n, D] fp32, what went in and came out.
        ends: [G] ints, the running ends that the batch carries.
        starts, lengths: [B] ints, where each sample lies on T.
    Returns:
        LOSS-DIFFERS where no known fault gives this output.
    """
    tokens = q_TND.shape[0]
    if tokens > MOST_TOKENS:
        return "LOSS-DIFFERS", f"the attention's output is wrong; T={tokens} is too long to try the known faults on"
    real = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    for code, words, mask in _hypotheses(tokens, np.diff(ends, prepend=0)):
        if _gives(q_TND, k_TND, v_TND, out_TND, mask, real):
            return code, words
    return "LOSS-DIFFERS", "the attention's output is that of no known fault"


def _gives(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, mask: np.ndarray, real: np.ndarray) -> bool:
    """Whether attention under a mask [T, T] (True = keep) has this output at the real tokens."""
    groups = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].T / np.sqrt(q.shape[2])
        scores = np.where(mask, scores, -np.inf)
        scores -= np.where(mask.any(1), scores.max(1, initial=-np.inf), 0.0)[:, None]
        weights = np.exp(scores)
        total = weights.sum(1, keepdims=True)
        expected = (weights / np.where(total > 0, total, 1.0)) @ v[:, head // groups]
        if not np.abs(expected[real] - out[real, head]).max() <= TOLERANCE * max(np.abs(expected[real]).max(), 1.0):
            return False
    return True


def _hypotheses(tokens: int, segments: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """(code, words, mask) of each known fault."""
    causal = np.tri(tokens, dtype=bool)
    isolated = _isolating(segments)
    yield "MASK-DENSE", "tokens see all samples before theirs: lengths are ignored", causal
    yield "MASK-INVERTED", "tokens see their sample's future as well: the causal mask is missing", isolated
    yield (
        "MASK-INVERTED",
        "tokens see what they must not and nothing else: the mask means the opposite",
        ~(causal & isolated),
    )
    yield "MASK-INVERTED", "tokens see their sample's future alone: the mask is upside down", causal.T & isolated
    for words, order in (
        ("ascending", np.sort(segments)),
        ("descending", np.sort(segments)[::-1]),
        ("reversed", segments[::-1]),
        ("moved by one", np.roll(segments, 1)),
    ):
        yield "LEN-ORDER", f"the lengths are {words} and the samples are not", causal & _isolating(order)
    ends = np.cumsum(segments)
    for place in range(min(len(ends) - 1, 64)):
        for shift in (1, -1):
            moved = ends.copy()
            moved[place] += shift
            if 0 < moved[place] < moved[place + 1] and (place == 0 or moved[place - 1] < moved[place]):
                words = f"segment {place} ends {'a token late' if shift > 0 else 'a token early'}"
                yield "LEN-WRONG", words, causal & _isolating(np.diff(moved, prepend=0))
    for place in range(min(len(segments) - 1, 64)):
        merged = np.concatenate([segments[:place], [segments[place] + segments[place + 1]], segments[place + 2 :]])
        yield "LEN-WRONG", f"segments {place} and {place + 1} are one", causal & _isolating(merged)


def _isolating(segments: np.ndarray) -> np.ndarray:
    ids = np.repeat(np.arange(len(segments)), segments)
    return ids[:, None] == ids[None, :]
