"""Numbers that are fixed outside this project: by the Ascend operator and by the convention for labels."""

IGNORE_INDEX = -100
"""Label of a token without loss, as in PyTorch, transformers and MindSpore."""

MAX_SEGMENTS = 1024
"""Most segments of a call of FlashAttentionScore in TND layout.

Source: mindspore.ops.flash_attention_score (2.9), ``actual_seq_qlen``.
"""
