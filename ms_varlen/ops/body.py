"""Which body computes the operators: picked once from the device target and logged once.

| body | where | what |
|---|---|---|
| ascend | Ascend | MindSpore's fused operators, `FlashAttentionScore` first of all |
| kernel | CPU | the C++ kernels of `csrc/`, compiled on first use |
| reference | CPU without a compiler | plain MindSpore operators |

The choice is a Python string while a graph is traced, so a graph holds one body and no branch. A graph that is compiled
already keeps the body it was compiled with.
"""

import functools
import logging

import mindspore as ms
from mindspore.ops.primitive import constexpr

from ms_varlen.errors import VarlenError
from ms_varlen.ops.kernels import load_kernels

logger = logging.getLogger("ms_varlen")

BODIES = ("ascend", "kernel", "reference")

_asked_for: str | None = None


@functools.lru_cache(maxsize=1)
def _pick() -> str:
    target = ms.get_context("device_target")
    if target == "Ascend":
        body, reason = "ascend", "fused operators"
    elif load_kernels():
        body, reason = "kernel", "C++ kernels"
    else:
        body, reason = "reference", "plain MindSpore operators"
    logger.info("operators use the %s body (%s) on %s", body, reason, target)
    return body


@constexpr
def body_in_use() -> str:
    """The body that operators run: "ascend", "kernel" or "reference". A constant inside graph-mode functions."""
    return _asked_for or _pick()


def use_body(body: str | None) -> None:
    """Run this body whatever the device is, for tests and benchmarks; None goes back to the device's own.

    Raises:
        VarlenError: no such body, or the kernels cannot be built here.
    """
    global _asked_for
    if body is not None and body not in BODIES:
        raise VarlenError(f"body must be one of {', '.join(BODIES)}, got {body!r}")
    if body == "kernel" and not load_kernels():
        raise VarlenError("body kernel must have a C++ compiler, found none that works; the log says why")
    _asked_for = body
