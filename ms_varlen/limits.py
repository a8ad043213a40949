"""Numbers that are fixed outside this project: by the Ascend operator and by the convention for labels."""

IGNORE_INDEX = -100
"""Label of a token without loss, as in PyTorch, transformers and MindSpore."""

MAX_SEGMENTS = 1024
"""Most segments of a call of FlashAttentionScore in TND layout.

Source, here and below: mindspore.ops.flash_attention_score (2.9).
"""

MAX_HEADS = 256
"""Most query heads of FlashAttentionScore."""

MAX_HEAD_DIM = 512
"""Largest head size of FlashAttentionScore."""

HEAD_DIM_MULTIPLE = 16
"""A head size of FlashAttentionScore is a multiple of this."""
