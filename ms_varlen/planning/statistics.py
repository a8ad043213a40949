"""Statistics of the lengths of a corpus."""

import numpy as np

from ms_varlen.planning.cost import CostModel

MAX_BINS = 60


def length_statistics(lengths: np.ndarray) -> dict:
    """Count, median, P90, P99, maximum, mean and sum of lengths.

    Args:
        lengths: [n] ints, tokens per sample, n >= 1.
    Returns:
        plain numbers, in tokens except `samples`; percentiles are interpolated between neighbours.
    """
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return {
        "samples": int(lengths.size),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": int(lengths.max()),
        "mean": float(lengths.mean(dtype=np.float64)),
        "tokens": int(lengths.sum(dtype=np.int64)),
    }


def length_histogram(lengths: np.ndarray) -> dict:
    """Count samples by length, in at most `MAX_BINS` bins that widen with the length.

    Edges are whole numbers and no bin is narrower than the one before. Rounded logarithms would not do: bins of one and
    of two lengths would alternate, and show a comb that the corpus does not have.

    Args:
        lengths: [n] ints >= 1, tokens per sample, n >= 1.
    Returns:
        `edges` [k+1], in tokens, and `counts` [k]; bin i holds edges[i] <= length < edges[i+1].
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    growth = ((longest + 1) / shortest) ** (1 / MAX_BINS) - 1
    edges = [shortest]
    while edges[-1] <= longest:
        # Rounded to hide the float error of the root, which could cost a bin too many.
        edges.append(edges[-1] + int(np.ceil(round(edges[-1] * growth, 6))))
    counts, _ = np.histogram(lengths, edges)
    return {"edges": edges, "counts": counts.tolist()}


def length_cumulative(lengths: np.ndarray, edges: list[int]) -> dict:
    """Shares of documents and tokens up to each length.

    Args:
        lengths: [n] ints >= 1, tokens per document, n >= 1.
        edges: [k+1] bounds of the bins of `length_histogram`.
    Returns:
        `lengths` [k], the longest of each bin; `documents` and `tokens` [k], the share of those up to it.
    """
    counts, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths.astype(np.float64))
    return {
        "lengths": [edge - 1 for edge in edges[1:]],
        "documents": (np.cumsum(counts) / counts.sum()).tolist(),
        "tokens": (np.cumsum(tokens) / tokens.sum()).tolist(),
    }


def cut_at(lengths: np.ndarray, limit: int, cost: CostModel) -> dict:
    """Loss and saving if every document is cut at `limit` tokens.

    Args:
        lengths: [n] ints, tokens per document, n >= 1.
        limit: the most tokens that are kept.
        cost: of a sequence.
    Returns:
        `limit`; documents and tokens cut, also as shares; and the shares of FLOPs saved if each document is padded to
        the longest allowed (`saved_padded`) and if nothing is padded (`saved_varlen`).
    """
    kept = np.minimum(lengths, limit)
    longest, documents = int(lengths.max()), lengths.size
    total, rest = int(lengths.sum(dtype=np.int64)), int(kept.sum(dtype=np.int64))
    cut = int(np.count_nonzero(lengths > limit))
    return {
        "limit": limit,
        "documents_cut": cut,
        "documents_cut_share": cut / documents,
        "tokens_cut": total - rest,
        "tokens_cut_share": 1 - rest / total,
        "saved_padded": 1 - cost.padded(documents, min(limit, longest)) / cost.padded(documents, longest),
        "saved_varlen": 1 - float(cost.cost(kept).sum()) / float(cost.cost(lengths).sum()),
    }
