"""What a bench found, from the seconds of single steps. Pure NumPy.

Contenders run the same steps in turns, so they are compared step by step: a speed-up is the median over steps of the
ratio of two times on the same samples, which a machine that slows down for a while hardly moves.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ms_varlen.planning.cost import CostModel, DecoderSizes

Steps = Mapping[int, Mapping[str, Any]]
"""Timed step -> what a contender said about it (`seconds` at least)."""


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs of training steps of one model.

    Attributes:
        cost: of a sequence, logits of every token included.
        head_token: of the logits of one token, forward and backward.
    """

    cost: CostModel
    head_token: float

    @classmethod
    def of_decoder(cls, sizes: DecoderSizes) -> "Work":
        """The work of a decoder."""
        assert sizes.vocab_size is not None, "DecoderConfig.with_vocab_size comes first"
        return cls(CostModel.of_decoder(sizes), 6.0 * sizes.hidden_size * sizes.vocab_size)

    def real(self, lengths: np.ndarray) -> float:
        """FLOPs of the samples of a step, [B] tokens each."""
        return float(self.cost.cost(lengths).sum())

    def laid_out(self, step: Mapping[str, Any]) -> float:
        """FLOPs of all that one of our own contenders was given in a step, padding included."""
        return self.cost.linear * step["tokens_computed"] + self.cost.quadratic * step["squared_tokens"]

    def computed(self, step: Mapping[str, Any]) -> float:
        """The same without the logits that it leaves out: the CPU kernel's, of tokens that have no loss."""
        return self.laid_out(step) - self.head_token * (step["tokens_computed"] - step["tokens_with_logits"])

    def needed(self, lengths: np.ndarray, step: Mapping[str, Any]) -> float:
        """FLOPs of the samples of a step, [B] tokens each, without the logits that are left out in it."""
        tokens = int(lengths.sum())
        return self.real(lengths) - self.head_token * max(0, tokens - step["tokens_with_logits"])


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = np.percentile(np.asarray(values, np.float64), [25, 50, 75])
    return {"median": float(median), "q1": float(low), "q3": float(high)}


def speeds(steps: Steps, real_tokens: Sequence[int]) -> dict[str, Any]:
    """Seconds of a step, and real tokens per second, over the steps that a contender ran.

    Args:
        steps: of one contender.
        real_tokens: tokens of samples, by step.
    """
    seconds = _seconds(steps)
    tokens = np.array([real_tokens[step] for step in sorted(steps)], np.float64)
    return {"step_seconds": spread(seconds), "real_tokens_per_second": spread(tokens / seconds)}


def speedup(steps: Steps, baseline: Steps) -> dict[str, float] | None:
    """How many times faster than a baseline on the same samples: median and quartiles over the steps both ran."""
    both = sorted(steps.keys() & baseline.keys())
    return spread([baseline[step]["seconds"] / steps[step]["seconds"] for step in both]) if both else None


def flop_limit(baseline: Steps, lengths: Sequence[np.ndarray], work: Work) -> dict[str, Any]:
    """How much faster than a padded baseline its steps could be, if only work on real tokens took time.

    Our own baselines are strong: their CPU kernel computes no logits of pads. `limit` counts them all the same, as the
    usual formula does; `computable_limit` counts what the baseline computes, which is all that can be saved.

    Args:
        baseline: a padded contender's steps, with `tokens_computed`, `tokens_with_logits` and `squared_tokens`.
        lengths: [B] ints, the samples' tokens, by step.
        work: of the model.
    Returns:
        limit: sum f(padded) / sum f(real) over the baseline's steps, f(s) = linear * s + quadratic * s * s.
        computable_limit: FLOPs that the baseline computes over those that the samples need.
        by_step, computable_by_step: step -> the same of that step.
    """
    real = {step: work.real(lengths[step]) for step in baseline}
    padded = {step: work.laid_out(values) for step, values in baseline.items()}
    needed = {step: work.needed(lengths[step], values) for step, values in baseline.items()}
    computed = {step: work.computed(values) for step, values in baseline.items()}
    return {
        "limit": sum(padded.values()) / sum(real.values()),
        "computable_limit": sum(computed.values()) / sum(needed.values()),
        "by_step": {step: padded[step] / real[step] for step in sorted(baseline)},
        "computable_by_step": {step: computed[step] / needed[step] for step in sorted(baseline)},
    }


def share_of_limit(steps: Steps, baseline: Steps, limit_by_step: Mapping[int, float]) -> float | None:
    """The median over steps of the speed-up over a baseline as a share of the most that there could be."""
    both = sorted(steps.keys() & baseline.keys())
    ratios = [baseline[s]["seconds"] / steps[s]["seconds"] / limit_by_step[s] for s in both]
    return float(np.median(ratios)) if both else None


def as_beside(steps: Steps, reference: Steps, reference_there: Steps) -> Steps:
    """Steps with the seconds that they would have taken in another group of contenders, in which a reference ran too.

    Args:
        steps: of a contender.
        reference: of the reference in the same group.
        reference_there: of the reference in the other group.
    Returns:
        the steps that all three ran, their seconds times the ratio of the reference's.
    """
    every = sorted(steps.keys() & reference.keys() & reference_there.keys())
    factors = {step: reference_there[step]["seconds"] / reference[step]["seconds"] for step in every}
    return {step: {**steps[step], "seconds": steps[step]["seconds"] * factors[step]} for step in every}


def rate_share(steps: Steps, work: Sequence[float] | Mapping[int, float], rate: float) -> float:
    """The median over steps of FLOPs per second as a share of the machine's rate.

    Args:
        steps: of one contender.
        work: FLOPs by step.
        rate: FLOP/s of matrix products.
    """
    return float(np.median([work[step] / values["seconds"] for step, values in steps.items()])) / rate


def calibration(steps: Steps) -> dict[str, float]:
    """Seconds per computed token, per squared token of a segment and per step, by least squares; none is negative.

    A term that the steps cannot tell from noise comes out as 0: few steps, or steps much alike, are no measurement.

    Args:
        steps: with `seconds`, `tokens_computed` and `squared_tokens`.
    Returns:
        the three, `relative_error` (root mean square, of the seconds), and the number of `steps`.
    """
    names = ("seconds_per_token", "seconds_per_squared_token", "seconds_per_step")
    seconds = _seconds(steps)
    rows = [(steps[s]["tokens_computed"], steps[s]["squared_tokens"], 1) for s in sorted(steps)]
    fitted = _nonnegative_fit(np.array(rows, np.float64) / seconds[:, None], np.ones_like(seconds))
    predicted = np.array(rows, np.float64) @ fitted
    error = float(np.sqrt(np.mean((predicted / seconds - 1) ** 2)))
    return dict(zip(names, fitted.tolist(), strict=True)) | {"relative_error": error, "steps": len(steps)}


def _nonnegative_fit(terms: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The best fit without negative coefficients: the best of the least squares over all choices of columns."""
    best, least = np.zeros(terms.shape[1]), float(target @ target)
    scale = np.linalg.norm(terms, axis=0)
    for size in range(1, terms.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(terms.shape[1]), size)):
            found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], target, rcond=None)[0] / scale[chosen]
            error = float(np.sum((terms[:, chosen] @ found - target) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[chosen] = found
    return best


def best_of(names: Sequence[str], steps: Mapping[str, Steps], reference: str) -> str | None:
    """The fastest of some contenders on the reference's samples; None when none of them ran.

    Args:
        names: of the contenders to choose from.
        steps: of all contenders.
        reference: name of the one that they are compared with.
    """
    against = {name: speedup(steps[reference], steps[name]) for name in names}
    ran = {name: found["median"] for name, found in against.items() if found}
    return min(ran, key=ran.__getitem__, default=None)


def loss_difference(steps: Steps, reference: Steps) -> float | None:
    """The largest difference of the loss per token from a reference, over the steps both ran."""
    both = steps.keys() & reference.keys()
    return max((abs(steps[step]["loss"] - reference[step]["loss"]) for step in both), default=None)


def _seconds(steps: Steps) -> np.ndarray:
    return np.array([steps[step]["seconds"] for step in sorted(steps)], np.float64)
