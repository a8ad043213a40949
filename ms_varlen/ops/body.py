"""Which body computes `varlen_attention`: picked once from the device target, said once in the log.

The choice is a Python string while a graph is traced, so a graph holds one body and no branch. A graph that is compiled
already keeps the body it was compiled with.
"""

import functools
import logging

import mindspore as ms
from mindspore.ops.primitive import constexpr

from ms_varlen.errors import VarlenError

logger = logging.getLogger("ms_varlen")

BODIES = ("ascend", "reference")

_asked_for: str | None = None


@functools.lru_cache(maxsize=1)
def _pick() -> str:
    target = ms.get_context("device_target")
    if target == "Ascend":
        body, reason = "ascend", "FlashAttentionScore"
    else:
        body, reason = "reference", "plain MindSpore operators"
    logger.info("varlen_attention uses the %s body (%s) on %s", body, reason, target)
    return body


@constexpr
def body_in_use() -> str:
    """The body that `varlen_attention` runs: "ascend" or "reference". A constant inside graph-mode functions."""
    return _asked_for or _pick()


def use_body(body: str | None) -> None:
    """Run this body whatever the device is, for tests and benchmarks; None goes back to the device's own.

    Raises:
        VarlenError: no such body.
    """
    global _asked_for
    if body is not None and body not in BODIES:
        raise VarlenError(f"body must be one of {', '.join(BODIES)}, got {body!r}")
    _asked_for = body
