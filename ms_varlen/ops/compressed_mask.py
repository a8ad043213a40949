"""The first rung of an alignment: the full mask of the padded side against the compressed mask of the NPU's operator.

`FlashAttentionScore` never sees a mask of T x T: it takes one triangle, and its sparse mode says what that means for
each sequence. Here this is written out and compared with the causal and length mask of padded rows, bit by bit, on any
machine. Pure NumPy, under 0.1 s.
"""

import numpy as np

from ms_varlen.errors import VarlenError
from ms_varlen.ops import ascend_attention
from ms_varlen.ops.dense_attention import dense_columns


def compressed_mask(tokens: int) -> np.ndarray:
    """What the compressed mask keeps of one sequence.

    Args:
        tokens: S, queries and keys of the sequence.
    Returns:
        [S, S] bool, True where a query may attend to a key: the triangle in the blocks of the diagonal, all of the
        blocks before them, nothing of those behind.
    Source: mindspore.ops.flash_attention_score, MindSpore 2.9, `sparse_mode` 3 (rightDownCausal).
    """
    keep = ascend_attention.CAUSAL_MASK.asnumpy() == 0
    block, within = np.divmod(np.arange(tokens), keep.shape[0])
    same, before = block[:, None] == block[None, :], block[:, None] > block[None, :]
    return before | (same & keep[within[:, None], within[None, :]])


def check_compressed_mask(longest: int) -> None:
    """Refuse a compressed mask that does not keep what the full mask of a padded row keeps.

    Args:
        longest: tokens of the longest sample; beyond two blocks of the compressed mask nothing new can show.
    Raises:
        VarlenError: they differ; the message gives the first query and key, the code says how.
    """
    tokens = min(longest, 2 * ascend_attention.CAUSAL_MASK.shape[0])
    full = dense_columns([tokens], 1, tokens)["attend_mask"][0]
    found = compressed_mask(tokens)
    if np.array_equal(found, full):
        return
    query, key = np.argwhere(found != full)[0].tolist()
    one = slice(min(tokens, ascend_attention.CAUSAL_MASK.shape[0]))
    inverted = any(np.array_equal(found[one, one], wrong[one, one]) for wrong in (~full, full.T))
    does = "keeps" if found[query, key] else "discards"
    raise VarlenError(
        f"the compressed mask must keep what the full mask keeps ({tokens} tokens), got one that {does} key {key} for "
        f"query {query} ({int((found != full).sum())} places differ); mark what it must discard with 1, "
        "all that is above the diagonal",
        "MASK-INVERTED" if inverted else "MASK-WRONG",
    )
