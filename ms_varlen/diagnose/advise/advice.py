"""Advice on a recipe for a corpus and a model, each with the numbers behind it.

Work is counted on plans of the corpus and compared in the model's FLOPs, or in seconds if a bench left a calibration.
FLOPs cannot tell how fast a device runs a dynamic shape; the reasons mention that.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ms_varlen.modes import MODES, Mode
from ms_varlen.planning.buckets import WORTH_A_BUCKET, auto_boundaries, optimal_boundaries
from ms_varlen.planning.cost import CostModel, DecoderSizes
from ms_varlen.planning.work import Calibration, EpochWork, memory_estimate
from ms_varlen.recipe.sizes import has_row_buckets

Pair = tuple[Mode, str]
"""A mode and a kind of shapes."""

GOOD_ENOUGH = 0.02
"""A pair that costs at most this much more than the cheapest is kept."""

PADDING_IS_AS_GOOD = 1.1
"""If lengths are alike, a speed-up over padding below this does not pay."""

SAME_STEP = 1.25
"""Steps whose tokens differ by at most this factor may keep their learning rate."""

PREFERRED: tuple[Pair, ...] = (
    (Mode.VARLEN, "range"),  # lengths in random order, one graph
    (Mode.PACKED, "static"),  # one size, and the fastest where dynamic shapes are slow
    (Mode.VARLEN, "static"),
    (Mode.PACKED, "range"),
    (Mode.VARLEN, "buckets"),
    (Mode.PACKED, "buckets"),
    (Mode.BUCKETED, "static"),
    (Mode.BUCKETED, "range"),
    (Mode.BUCKETED, "buckets"),
    (Mode.PADDED, "range"),
    (Mode.PADDED, "static"),
    (Mode.PADDED, "buckets"),
)
"""Order of preference among equally cheap pairs: simplest and most random first."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """One thing to choose.

    Attributes:
        key: YAML path of the key, or a word if no key sets it.
        advised: the value to take.
        recipe: the value in the recipe; None if it leaves the key out.
        numbers: the numbers behind the advice, by name with unit.
        why: the same in words.
    """

    key: str
    advised: Any
    recipe: Any
    numbers: Mapping[str, float]
    why: str
    is_key: bool = True
    """False for a value that follows from the advice and cannot be set."""

    @property
    def differs(self) -> bool:
        """Whether the recipe has another value."""
        return self.is_key and self.advised != self.recipe

    def to_json(self) -> dict[str, Any]:
        """Plain values, `differs` among them."""
        return {**dataclasses.asdict(self), "numbers": dict(self.numbers), "differs": self.differs}


@dataclasses.dataclass(frozen=True)
class Situation:
    """Everything that advice depends on.

    Attributes:
        pair: the recipe's mode and kind of shapes.
        works: an epoch of every pair that is possible, the recipe's among them.
        padded: an epoch of rows padded to the "maximum" and to the "batch_maximum", without rows of pads only.
        documents: `length_statistics` of documents before they were cut.
        cut_at_p99: `statistics.cut_at` of the documents at their P99.
        counts: [longest + 1] ints, how many samples have each length.
        padded_counts: the same for the lengths that rows of a padded recipe are padded to.
        sizes, parameters: of the decoder.
        value_bytes: of an activation.
        recompute, seq_length, divisor, token_budget, rows, row_buckets, max_graphs, learning_rate: as in the recipe;
            None where it has none.
        num_buckets: how many row lengths were picked for the recipe; None where it picks none.
        epochs: passes over the corpus in the whole run.
        max_memory: bytes; None without a limit.
        slow_range: whether the device may run a range of sizes far slower than static ones.
        calibration: None without a bench of this model.
        calibration_note: why a calibration was found but not used, in words; None otherwise.
    """

    pair: Pair
    works: Mapping[Pair, EpochWork]
    padded: Mapping[str, EpochWork]
    documents: Mapping[str, float]
    cut_at_p99: Mapping[str, float]
    counts: np.ndarray
    padded_counts: np.ndarray
    sizes: DecoderSizes
    parameters: int
    value_bytes: int
    recompute: bool
    seq_length: int
    divisor: int
    token_budget: int | None
    rows: int | None
    row_buckets: Sequence[int] | None
    num_buckets: int | None
    max_graphs: int
    learning_rate: float | None
    epochs: float
    max_memory: float | None
    slow_range: bool
    calibration: Calibration | None
    calibration_note: str | None = None

    @property
    def cost(self) -> CostModel:
        """FLOPs of a sequence."""
        return CostModel.of_decoder(self.sizes)

    def price(self, pair: Pair) -> float:
        """Work of a pair for each real token: seconds with a calibration, FLOPs without."""
        work = self.works[pair]
        return self._seconds(work) if self.calibration else self._flops(work)

    def speedup(self, pair: Pair, over: EpochWork) -> dict[str, float]:
        """How many times less work: by FLOPs and, with a calibration, by seconds; both at the same real tokens."""
        work = self.works[pair]
        found = {"flops": self._flops(over) / self._flops(work)}
        if self.calibration:
            found["seconds"] = self._seconds(over) / self._seconds(work)
        return found

    def memory(self, tokens: int) -> dict[str, float]:
        """Bytes of a training step on T = `tokens`."""
        return memory_estimate(self.sizes, self.parameters, tokens, self.value_bytes, self.recompute)

    def _flops(self, work: EpochWork) -> float:
        return work.per_token(work.flops(self.cost))

    def _seconds(self, work: EpochWork) -> float:
        assert self.calibration is not None
        return work.per_token(self.calibration.seconds(work))


def choose_pair(situation: Situation) -> Pair:
    """The mode and kind of shapes to take: the recipe's if it is among the cheapest, else the simplest of them."""
    fitting = [pair for pair, work in situation.works.items() if work.graphs <= situation.max_graphs]
    fast = [pair for pair in fitting if not (situation.slow_range and pair[1] == "range")]
    candidates = fast or fitting or list(situation.works)
    price = {pair: situation.price(pair) for pair in candidates}
    padded = [pair for pair in candidates if not pair[0].follows_lengths]
    if padded and _alike(situation) and min(price[p] for p in padded) < PADDING_IS_AS_GOOD * min(price.values()):
        candidates = padded
    cheapest = min(price[pair] for pair in candidates)
    good = [pair for pair in candidates if price[pair] <= (1 + GOOD_ENOUGH) * cheapest]
    return situation.pair if situation.pair in good else min(good, key=PREFERRED.index)


def choose_boundaries(situation: Situation, mode: Mode) -> np.ndarray:
    """Row lengths and how many of them, [K] int64: one more must save more than its graph costs.

    Without a calibration they are those that `auto` picks.

    Args:
        mode: padded rows have mixed lengths and are attended to as a whole; others have like lengths.
    """
    calibration = situation.calibration
    others = min(work.graphs for work in situation.works.values()) - 1  # graphs that are not of training
    most = max(1, situation.max_graphs - others)
    if calibration and calibration.seconds_per_compile > 0 and calibration.seconds_per_token > 0:
        seconds = CostModel(calibration.seconds_per_token, calibration.seconds_per_squared_token)
        price = calibration.seconds_per_compile / situation.epochs
        counts, of_row = _rows(situation, mode, seconds)
        return optimal_boundaries(counts, of_row.cost, most, situation.divisor, price)
    counts, of_row = _rows(situation, mode, situation.cost)
    return auto_boundaries(counts, of_row.cost, None, most, situation.divisor)


def _rows(situation: Situation, mode: Mode, cost: CostModel) -> tuple[np.ndarray, CostModel]:
    """How often rows are padded to each length or above, and what a row costs."""
    return (situation.counts, cost.of_row) if mode.follows_lengths else (situation.padded_counts, cost)


def advise(situation: Situation) -> list[Advice]:
    """Everything there is to choose, the most important first."""
    pair = choose_pair(situation)
    parts: list[Callable[[Situation, Pair], Advice | None]] = [
        _mode,
        _kind,
        _speedup,
        _seq_length,
        _row_buckets,
        _num_buckets,
        _micro_batch,
        _memory,
        _graphs,
        _steps,
        _learning_rate,
    ]
    found = [part(situation, pair) for part in parts]
    return [advice for advice in found if advice is not None]


def _alike(situation: Situation) -> bool:
    return situation.documents["p99"] < 2 * situation.documents["p50"]


def _mode(situation: Situation, pair: Pair) -> Advice:
    spread = situation.documents["p99"] / situation.documents["p50"]
    best = {mode: situation.works[_best(situation, mode)] for mode in _modes(situation)}
    gains = {mode: situation.speedup(pair, work)["flops"] for mode, work in best.items()}
    others = ", ".join(f"{mode} {gain:.2f}" for mode, gain in gains.items() if mode is not pair[0])
    if _alike(situation):
        rule = f"P99 is {spread:.2f} x the median, below 2: padding may be as good"
    else:
        rule = f"P99 is {spread:.1f} x the median, not below 2, where padding may be as good"
    numbers = {"p99_over_p50": spread} | {f"{mode}_work_over_advised": gain for mode, gain in gains.items()}
    why = f"{rule}. Work per real token, this mode 1: {others}"
    return Advice("mode", pair[0], situation.pair[0], numbers, why)


def _modes(situation: Situation) -> list[Mode]:
    return sorted({mode for mode, _ in situation.works}, key=MODES.index)


def _best(situation: Situation, mode: Mode) -> Pair:
    return min((pair for pair in situation.works if pair[0] is mode), key=situation.price)


def _kind(situation: Situation, pair: Pair) -> Advice:
    kinds = {kind: work for (mode, kind), work in situation.works.items() if mode is pair[0]}
    numbers = {f"{kind}_padding_overhead": 1 / work.token_share - 1 for kind, work in kinds.items()}
    numbers |= {f"{kind}_graphs": work.graphs for kind, work in kinds.items()}
    pads = ", ".join(f"{kind} {1 / work.token_share - 1:.1%} ({work.graphs} graphs)" for kind, work in kinds.items())
    device = (
        "an NPU may run a range of sizes at half the speed of static ones"
        if situation.slow_range
        else "on a CPU with fused kernels a range costs no more than one size"
    )
    return Advice("shapes.kind", pair[1], situation.pair[1], numbers, f"padding: {pads}; {device}: bench decides")


def _speedup(situation: Situation, pair: Pair) -> Advice:
    gains = {name: situation.speedup(pair, over) for name, over in situation.padded.items()}
    used = situation.calibration
    words = [
        f"over padded to the {name.replace('_', ' ')} {gain['flops']:.2f} x by FLOPs"
        + (f", {gain['seconds']:.2f} x by measured seconds" if used else "")
        for name, gain in gains.items()
    ]
    basis = (
        f"decided by calibration.json ({used.machine}; fit within {used.relative_error:.0%})"
        if used
        else f"decided by the model's FLOPs; {situation.calibration_note or 'ms-varlen bench measures'}"
    )
    numbers = {f"over_padded_to_{name}_by_{unit}": x for name, gain in gains.items() for unit, x in gain.items()}
    value = gains["maximum"]["seconds" if used else "flops"]
    return Advice("speed-up over padding", round(value, 2), None, numbers, f"{'; '.join(words)}; {basis}", is_key=False)


def _seq_length(situation: Situation, pair: Pair) -> Advice:
    documents, cut = situation.documents, situation.cut_at_p99
    longest, divisor = int(documents["max"]), situation.divisor
    to_p99, to_max = int(cut["limit"]), -(-longest // divisor) * divisor
    advised = to_p99 if longest > 2 * documents["p99"] else to_max
    if to_p99 <= situation.seq_length <= 2 * to_p99:
        advised = situation.seq_length
    gigabytes = {name: situation.memory(tokens)["total"] / 1e9 for name, tokens in (("p99", to_p99), ("max", to_max))}
    why = (
        f"at P99 ({to_p99:,}) cutting hits {cut['documents_cut']:,} documents and {cut['tokens_cut_share']:.2%} of the "
        f"tokens (overlong=split keeps them) and saves {cut['saved_padded']:.0%} of the FLOPs when padded, "
        f"{cut['saved_varlen']:.1%} when not; a step on one sequence of the maximum ({to_max:,}) takes "
        f"{gigabytes['max']:.2f} GB, of P99 {gigabytes['p99']:.2f} GB"
    )
    numbers = {"p99": to_p99, "max": to_max, "memory_p99_gb": gigabytes["p99"], "memory_max_gb": gigabytes["max"]}
    numbers |= {name: cut[name] for name in ("documents_cut", "tokens_cut_share", "saved_padded", "saved_varlen")}
    return Advice("model.seq_length", advised, situation.seq_length, numbers, why)


def _row_buckets(situation: Situation, pair: Pair) -> Advice:
    boundaries = choose_boundaries(situation, pair[0])
    counts, of_row = _rows(situation, pair[0], situation.cost)
    padded = _row_overhead(counts, boundaries)
    one_less = optimal_boundaries(counts, of_row.cost, max(1, boundaries.size - 1), situation.divisor)
    before = _row_overhead(counts, one_less)
    numbers = {"num_buckets": boundaries.size, "padding_overhead": padded, "padding_overhead_one_less": before}
    limit = "its graph takes to compile" if situation.calibration else f"{WORTH_A_BUCKET:.0%} of the work"
    why = (
        f"{boundaries.size} row lengths pad {padded:.1%}, one less {before:.1%}; another saves less than {limit}. For "
        "bucketed recipes, and padded ones with shapes.kind buckets"
    )
    advised = boundaries.tolist()
    if advised[-1] < situation.seq_length:
        advised.append(situation.seq_length)  # a recipe's list ends there
    listed = None if situation.row_buckets is None else list(situation.row_buckets)
    return Advice("shapes.row_buckets", advised, listed, numbers, why, is_key=listed is not None)


def _num_buckets(situation: Situation, pair: Pair) -> Advice | None:
    if situation.num_buckets is None or not has_row_buckets(*pair):
        return None
    boundaries = choose_boundaries(situation, pair[0])
    overhead = _row_overhead(_rows(situation, pair[0], situation.cost)[0], boundaries)
    why = f"{boundaries.size} row lengths pad {overhead:.1%}; see shapes.row_buckets"
    numbers = {"padding_overhead": overhead}
    return Advice("shapes.num_buckets", boundaries.size, situation.num_buckets, numbers, why)


def _row_overhead(counts: np.ndarray, boundaries: np.ndarray) -> float:
    lengths = np.arange(1, counts.size)
    computed = boundaries[np.searchsorted(boundaries, lengths)] @ counts[1:]
    return float(computed / (lengths @ counts[1:]) - 1)


def _micro_batch(situation: Situation, pair: Pair) -> Advice:
    work = situation.works[pair]
    by_rows = pair[0].sized_by_rows
    now, tokens_each = (situation.rows, situation.seq_length) if by_rows else (situation.token_budget, 1)
    advised = now or work.largest // tokens_each
    numbers = {"tokens_per_step": work.tokens_per_step, "largest_tokens": work.largest}
    why = f"a step has {work.tokens_per_step:,.0f} real tokens on average; T is at most {work.largest:,}"
    if situation.max_memory is not None:
        weights, each = situation.memory(0)["total"], situation.memory(1)["total"] - situation.memory(0)["total"]
        most = int((situation.max_memory - weights) / each)
        step = tokens_each if by_rows else situation.divisor
        fits = max(0, most // step * step)
        numbers["largest_tokens_in_memory"] = fits
        why += f"; device.max_memory holds T up to {fits:,}"
        if fits < work.largest:
            advised = max(fits, situation.seq_length) // tokens_each
    return Advice(pair[0].size_key, advised, now, numbers, why)


def _memory(situation: Situation, pair: Pair) -> Advice:
    tokens = situation.works[pair].largest
    parts = {name: size / 1e9 for name, size in situation.memory(tokens).items()}
    kept = "H" if situation.recompute else "(4H + 2ND + 2KD + 3F)"
    why = (
        f"at T {tokens:,}: weights {parts['weights']:.2f} (16 B each), activations {parts['activations']:.2f} "
        f"({situation.value_bytes} B x T x layers x {kept}), logits {parts['logits']:.2f} (4 arrays of T x V in fp32; "
        "the CPU kernel holds 384 rows only). MindSpore on a CPU took 1.4 to 2.2 times the activations. T must hold "
        "the longest sample: that is what costs"
    )
    return Advice(
        "memory, GB at least",
        round(parts["total"], 2),
        None,
        {f"{k}_gb": v for k, v in parts.items()},
        why,
        is_key=False,
    )


def _graphs(situation: Situation, pair: Pair) -> Advice:
    graphs = situation.works[pair].graphs
    numbers: dict[str, float] = {"graphs": graphs, "max_graphs": situation.max_graphs}
    why = f"training, optimizer and evaluation; graph.max_graphs allows {situation.max_graphs}"
    if situation.calibration:
        numbers["compile_seconds"] = graphs * situation.calibration.seconds_per_compile
        why += f"; about {numbers['compile_seconds']:.0f} s to compile, measured"
    return Advice("graphs", graphs, None, numbers, why, is_key=False)


def _steps(situation: Situation, pair: Pair) -> Advice:
    work, now = situation.works[pair], situation.works[situation.pair]
    numbers: dict[str, float] = {"steps_per_epoch": work.steps, "recipe_steps_per_epoch": now.steps}
    why = "counted on the plan of the first epoch"
    if now.steps != work.steps:
        why += f"; the recipe as it is: {now.steps:,}"
    if situation.calibration:
        numbers["seconds_per_epoch"] = situation.calibration.seconds(work)
        why += f"; an epoch takes about {numbers['seconds_per_epoch']:,.0f} s by calibration.json"
    return Advice("steps an epoch", work.steps, None, numbers, why, is_key=False)


def _learning_rate(situation: Situation, pair: Pair) -> Advice | None:
    """A warning when an advised step has other tokens. Source: square-root rule of Malladi et al. 2022 (Adam SDEs)."""
    before, after = (situation.works[p].tokens_per_step for p in (situation.pair, pair))
    ratio = after / before
    if situation.learning_rate is None or 1 / SAME_STEP <= ratio <= SAME_STEP:
        return None
    advised = float(f"{situation.learning_rate * ratio**0.5:.3g}")
    why = (
        f"a step goes from {before:,.0f} to {after:,.0f} real tokens (x {ratio:.2f}): either keep them with "
        f"batch.micro_batches, or multiply the rate by the square root, {ratio**0.5:.2f}"
    )
    return Advice("train.learning_rate", advised, situation.learning_rate, {"tokens_per_step_ratio": ratio}, why)
