"""Name the fault of a wrong attention: recover from its output which tokens each token saw. Pure NumPy.

Attention over the keys [s, e) is a quotient of two differences of prefix sums, so that all starts s (or all ends e) of
one token cost O(T D). Masks that are no ranges, and wrong orders of the lengths, are tried first, as hypotheses.
"""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

TOLERANCE = 1e-4
RANGE_TOLERANCE = 2e-5
"""Relative to the largest value, for a range of keys: one key among thousands moves an output by little."""
MOST_TOKENS = 2048
"""Longest batch that is searched for faults, in tokens; the T x T scores of one hypothesis are held at a time."""


def name_attention_fault(
    q_TND: np.ndarray,
    k_TND: np.ndarray,
    v_TND: np.ndarray,
    out_TND: np.ndarray,
    ends: np.ndarray,
    starts: np.ndarray,
    lengths: Sequence[int],
) -> tuple[str, str]:
    """Return the catalogue's code for a wrong attention output, and the fault in words.

    Args:
        q_TND, k_TND, v_TND, out_TND: [T, N or n, D] fp32, inputs and output.
        ends: [G] ints, the running ends that the batch carries.
        starts, lengths: [B] ints, where each sample lies on T.
    Returns:
        LOSS-DIFFERS if no known fault gives this output.
    """
    tokens = q_TND.shape[0]
    if tokens > MOST_TOKENS:
        return "LOSS-DIFFERS", f"the attention's output is wrong; T={tokens} is too long to try the known faults on"
    segments, firsts, sizes = np.diff(ends, prepend=0), np.asarray(starts), np.asarray(lengths)
    real = np.concatenate([np.arange(start, start + size) for start, size in zip(firsts, sizes, strict=True)])
    for code, words, mask in _hypotheses(tokens, segments):
        if _gives(q_TND, k_TND, v_TND, out_TND, mask, real):
            return code, words
    first_of = np.repeat(firsts, sizes)
    q, k, v, out = (x[:, 0].astype(np.float64) for x in (q_TND, k_TND, v_TND, out_TND))
    seen = _seen_ranges(q, k, v, out, real, first_of, sizes)
    found = _name_ranges(seen, real, first_of, segments, firsts)
    return found or _name_scale(q_TND, k_TND, v_TND, out_TND, np.tri(tokens, dtype=bool) & _isolating(segments), real)


def _gives(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, mask: np.ndarray, real: np.ndarray) -> bool:
    """Return whether attention under a mask [T, T] (True = keep) gives this output at the real tokens."""
    groups = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        expected = _attend(q[:, head], k[:, head // groups], v[:, head // groups], mask)[real]
        if not np.abs(expected - out[real, head]).max() <= TOLERANCE * max(np.abs(expected).max(), 1.0):
            return False
    return True


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Attention of one head: [T, D]; a token that sees nothing gets 0."""
    scores = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    scores -= np.where(mask.any(1), scores.max(1, initial=-np.inf), 0.0)[:, None]
    weights = np.exp(scores)
    total = weights.sum(1, keepdims=True)
    return (weights / np.where(total > 0, total, 1.0)) @ v


def _hypotheses(tokens: int, segments: np.ndarray) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield (code, words, mask) of the faults that are no ranges."""
    causal = np.tri(tokens, dtype=bool)
    isolated = _isolating(segments)
    if len(segments) > 1:  # else it is the right mask
        yield "MASK-DENSE", "tokens see all samples before theirs: lengths are ignored", causal
    yield "MASK-INVERTED", "tokens see their sample's future as well: the causal mask is missing", isolated
    yield (
        "MASK-INVERTED",
        "tokens see exactly the tokens that they must not see: the mask is inverted",
        ~(causal & isolated),
    )
    yield "MASK-INVERTED", "tokens see their sample's future alone: the mask is upside down", causal.T & isolated
    for words, order in (
        ("ascending", np.sort(segments)),
        ("descending", np.sort(segments)[::-1]),
        ("reversed", segments[::-1]),
        ("moved by one", np.roll(segments, 1)),
    ):
        if not np.array_equal(order, segments):
            yield "LEN-ORDER", f"the lengths are {words} and the samples are not", causal & _isolating(order)


def _isolating(segments: np.ndarray) -> np.ndarray:
    ids = np.repeat(np.arange(len(segments)), segments)
    return ids[:, None] == ids[None, :]


def _seen_ranges(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    real: np.ndarray,
    first_of: np.ndarray,
    sizes: np.ndarray,
) -> np.ndarray:
    """Return [real tokens, 2] ints, the keys [s, e) that explain each token's output; -1 if none do.

    Args:
        q, k, v, out: [T, D] float64 of one head.
        real: places of the samples' own tokens on T; `first_of` the first place of the sample of each.
        sizes: [B] ints, the samples' lengths.
    """
    tokens, limit = q.shape[0], RANGE_TOLERANCE * max(float(np.abs(v).max()), 1e-30)
    places = np.arange(tokens + 1)
    seen = np.full((real.size, 2), -1)
    for i, (t, first, last) in enumerate(zip(real, first_of, first_of + np.repeat(sizes, sizes), strict=True)):
        scores = k @ q[t] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        total = np.concatenate([[0.0], np.cumsum(weights)])
        summed = np.concatenate([np.zeros((1, v.shape[1])), np.cumsum(weights[:, None] * v, axis=0)])
        # The right range comes first: equal tokens let several ranges give one output.
        pairs = [(np.array([first]), np.array([t + 1])), (places[: t + 1], np.full(t + 1, t + 1))]
        pairs += [(np.full(tokens - first, first), places[first + 1 :]), (places[:last], np.full(last, last))]
        for s, e in pairs:
            mass = np.maximum(total[e] - total[s], 1e-300)
            error = np.abs((summed[e] - summed[s]) / mass[:, None] - out[t]).max(1)
            if error.min() <= limit:
                near = np.flatnonzero(error <= 2 * error.min() + limit / 10)
                best = near[np.argmin(np.abs(s[near] - first) + np.abs(e[near] - t - 1))]
                seen[i] = s[best], e[best]
                break
    return seen


def _name_ranges(
    seen: np.ndarray, real: np.ndarray, first_of: np.ndarray, segments: np.ndarray, firsts: np.ndarray
) -> tuple[str, str] | None:
    """Return the fault that lets each token see these keys; None if they are right or unknown."""
    start, end = seen.T
    ahead, known = end - (real + 1), start >= 0
    nothing_before = ~known & (real == first_of)
    if not (known | nothing_before).all():
        return None
    if (ahead[known] == 0).all() and known.all():
        if (start == first_of).all():
            return None
        return _name_starts(start, real, first_of, segments, firsts)
    if (start[known] == first_of[known]).all():
        return _name_ends(ahead[known], end[known] - first_of[known])
    return "MASK-WRONG", "tokens see others than those of their sample up to themselves"


def _name_ends(ahead: np.ndarray, depth: np.ndarray) -> tuple[str, str]:
    """Name the fault of tokens that see from their sample's start to a wrong end: `ahead` of it, `depth` in all."""
    usual = collections.Counter(ahead.tolist()).most_common(1)[0][0]
    if usual == -1:
        return "MASK-WRONG", "tokens do not see themselves: the causal mask is one short"
    if usual < 0:
        return "MASK-WRONG", f"the causal mask is {-usual} tokens short"
    if usual > 0:
        return "MASK-WRONG", f"tokens see {'the next one' if usual == 1 else f'{usual} tokens ahead'}: the causal " + (
            f"mask is {usual} too far"
        )
    reached = np.unique(depth[ahead > 0])
    if reached.size == 1 and (ahead >= 0).all():
        return "MASK-WRONG", f"the first {reached[0]} tokens of a sample see each other: a prefix is not masked"
    return "MASK-WRONG", f"{int((ahead != 0).sum())} of {ahead.size} tokens see too far or not far enough"


def _name_starts(
    start: np.ndarray, real: np.ndarray, first_of: np.ndarray, segments: np.ndarray, firsts: np.ndarray
) -> tuple[str, str]:
    """Name the fault of tokens that see up to themselves, but from a wrong start."""
    begun = np.unique(start)
    width = int((real + 1 - start).max())
    if (np.maximum(first_of, real + 1 - width) == start).all():
        return "MASK-WRONG", f"tokens see the last {width} of their sample alone: a sliding window"
    if not np.array_equal(begun[np.searchsorted(begun, real, side="right") - 1], start):
        i = int(np.argmax(start < first_of))
        return "MASK-DENSE", f"tokens see across the boundary: the one at {real[i]} sees from {start[i]} on, its " + (
            f"sample begins at {first_of[i]}"
        )
    used = np.diff(np.append(begun, real[-1] + 1)).tolist()
    left, whole = collections.Counter(segments.tolist()), collections.Counter(used[:-1])
    moved = used[:-1] != segments[: len(used) - 1].tolist()
    # The end of the samples may cut the last one, which must still fit a segment that is left.
    if moved and not whole - left and used[-1] <= max(left - whole, default=0):
        return "LEN-ORDER", f"attention used lengths {used[:6]}, the samples have {segments[:6].tolist()}"
    return "LEN-WRONG", _name_moved_ends(begun, firsts)


def _name_moved_ends(begun: np.ndarray, firsts: np.ndarray) -> str:
    """Describe how the places where attention starts again differ from the starts of the samples."""
    missing, extra = np.setdiff1d(firsts, begun), np.setdiff1d(begun, firsts)
    if missing.size == 0:
        return f"an end more than there are samples, at {extra[0]}: a sample is cut in two"
    segment = int(np.searchsorted(firsts, missing[0])) - 1
    if extra.size == 0:
        return f"segments {segment} and {segment + 1} are one"
    moved = int(extra[np.argmin(np.abs(extra - missing[0]))] - missing[0])
    many = "a token" if abs(moved) == 1 else f"{abs(moved)} tokens"
    return f"segment {segment} ends {many} {'late' if moved > 0 else 'early'}"


def _name_scale(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, mask: np.ndarray, real: np.ndarray
) -> tuple[str, str]:
    """Name a wrong scale of the scores or of the output; else an unknown fault. Looks at the first head."""
    expected, given = _attend(q[:, 0], k[:, 0], v[:, 0], mask)[real], out[real, 0]
    factor = float((given * expected).sum() / max(float((expected * expected).sum()), 1e-30))
    if np.abs(factor * expected - given).max() <= RANGE_TOLERANCE * np.abs(given).max():
        if abs(factor - 1) < 1e-5:
            return "LOSS-DIFFERS", "no known fault gives the attention's output; the first head's is right"
        return "LOSS-DIFFERS", f"the attention's output is {factor:.4g} times the right one"
    rows = real[: min(real.size, 256)]
    some, keep = slice(0, int(rows.max()) + 1), mask[: int(rows.max()) + 1, : int(rows.max()) + 1]

    def error(scale: float) -> float:
        return float(np.abs(_attend(q[some, 0] * scale, k[some, 0], v[some, 0], keep)[rows] - out[rows, 0]).max())

    centre, reach = 0.0, np.log(256.0)
    for _ in range(9):
        logs = centre + reach * np.linspace(-1, 1, 17)
        centre, reach = float(min(logs, key=lambda log: error(np.exp(log)))), reach / 4
    scale = float(np.exp(centre))
    if error(scale) <= RANGE_TOLERANCE * float(np.abs(v).max()):
        return "LOSS-DIFFERS", f"the scores are {scale:.3g} times the right ones: a wrong scale"
    return "LOSS-DIFFERS", "no known fault gives the attention's output"
