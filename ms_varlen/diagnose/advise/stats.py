"""The numbers of `ms-varlen stats`, and the modes compared on a corpus: waste of each, and advice."""

import dataclasses
import json
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.store.store import Progress, TokenStore, prepare_store
from ms_varlen.data.tokens.cleaning import Ledger as CleaningLedger
from ms_varlen.diagnose.advise.advice import Advice, Pair, Situation, advise, choose_pair
from ms_varlen.errors import DataError, RecipeError
from ms_varlen.graph.shapes import round_up
from ms_varlen.modes import MODES, Mode
from ms_varlen.ops.kernel_build import COMPILERS
from ms_varlen.planning.buckets import batch_maximum_counts
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.rows import WindowTrade, divisor_boundaries, window_trade
from ms_varlen.planning.statistics import cut_at, length_cumulative, length_histogram, length_statistics
from ms_varlen.planning.work import Calibration, EpochWork
from ms_varlen.recipe.recipe import Recipe, load_recipe, parse_recipe
from ms_varlen.recipe.yaml_text import apply_overrides
from ms_varlen.workload.memory import device_bytes
from ms_varlen.workload.sizes import SampleLengths, recipe_row_lengths
from ms_varlen.workload.translation import (
    compare_variants,
    overrides_between,
    padded_works,
    rows_of,
    sampled,
    variant,
)

WINDOWS = (100, 1_000, 10_000, 100_000)
CALIBRATION_FILE = "calibration.json"
DEFAULT_MODEL = {"architecture": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
SHARES = tuple(mode for mode in MODES if mode.follows_lengths)
"""Modes whose real work is compared with that of padded rows."""


def stats_recipe(target: str, tokenizer: str | None, seq_length: int | None, overrides: Iterable[str]) -> Recipe:
    """The recipe of `ms-varlen stats`: a file, or a default decoder on a source.

    Args:
        target: path of a YAML file, or a value of `data.source`.
        tokenizer: as `data.tokenizer`; "bytes" if None. Only for a source.
        seq_length: as `model.seq_length`; 2048 if None. Only for a source.
        overrides: ``section.key=value``.
    Raises:
        RecipeError: all faults at once.
    """
    if is_recipe(target):
        given = {"--tokenizer": ("data.tokenizer", tokenizer), "--seq-length": ("model.seq_length", seq_length)}
        faults = [
            f"{option}: must be left out with a recipe, got {value}; set {key}={value}"
            for option, (key, value) in given.items()
            if value is not None
        ]
        if faults:
            raise RecipeError(faults, target)
        return load_recipe(target, overrides)
    longest = 2048 if seq_length is None else seq_length
    divisor = math.gcd(max(longest, 1), 64)
    values: dict[str, Any] = {
        "mode": "varlen",
        "data": {"source": target, "tokenizer": tokenizer or "bytes", "eval_fraction": 0.0},
        "batch": {"token_budget": round_up(max(4096, 2 * longest), divisor)},
        "shapes": {"kind": "range", "divisor": divisor},
        "model": {
            "config": dict(DEFAULT_MODEL),
            "variable_seq_lengths": True,
            "seq_length": longest,
            "max_position_embeddings": longest,
        },
        "train": {"steps": 1000, "learning_rate": 1e-3},
        "checkpoint": {"output_dir": "output/stats"},
    }
    return parse_recipe(values, where=target, faults=apply_overrides(values, overrides))


def is_recipe(target: str) -> bool:
    """Whether a command's argument is a recipe rather than a source."""
    return target.endswith((".yaml", ".yml"))


@dataclasses.dataclass(frozen=True)
class CorpusStats:
    """The numbers of `ms-varlen stats`.

    Attributes:
        target: the command's argument.
        source, tokenizer, seq_length: as in the recipe.
        documents, samples: `length_statistics` of documents before they were cut, and of the training samples.
        cleaning: documents and tokens that cleaning read, kept, cut and dropped.
        flops_of: the model whose FLOPs are counted, in words.
        comparison: of the modes.
        histogram, cumulative: of the documents' lengths.
    """

    target: str
    source: str | list[Any]
    tokenizer: str
    seq_length: int
    documents: dict[str, Any]
    samples: dict[str, Any]
    cleaning: CleaningLedger
    flops_of: str
    comparison: "Comparison"
    histogram: dict[str, list[int]]
    cumulative: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """JSON values by name; those of `comparison` stand among the others."""
        return {
            "target": self.target,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "seq_length": self.seq_length,
            "documents": self.documents,
            "samples": self.samples,
            "cleaning": dataclasses.asdict(self.cleaning),
            "cut_at_p99": dict(self.comparison.situation.cut_at_p99),
            "flops_of": self.flops_of,
            **self.comparison.to_json(),
            "histogram": self.histogram,
            "cumulative": self.cumulative,
        }


def corpus_stats(target: str, recipe: Recipe, progress: Progress | None = None) -> CorpusStats:
    """Count a corpus and compare the modes on it.

    Args:
        target: the command's argument.
        recipe: of `stats_recipe`.
        progress: called while a token store is built.
    """
    store = prepare_store(recipe.data, recipe.model.seq_length, progress)
    own = is_recipe(target)
    comparison = Comparison.of(recipe, store, own=own)
    model, documents = comparison.situation.sizes, document_lengths(store)
    statistics, histogram = length_statistics(documents), length_histogram(documents)
    return CorpusStats(
        target=target,
        source=recipe.data.source,
        tokenizer=recipe.data.tokenizer,
        seq_length=recipe.model.seq_length,
        documents={"documents": statistics.pop("samples"), **statistics},
        samples=length_statistics(np.asarray(store.train.lengths)),
        cleaning=store.ledgers["train"] + store.ledgers["eval"],
        flops_of=f"{'the recipe' if own else 'a default decoder'}: {model.num_hidden_layers} layers, hidden size "
        f"{model.hidden_size}, vocabulary {model.vocab_size}",
        comparison=comparison,
        histogram=histogram,
        cumulative=length_cumulative(documents, histogram["edges"]),
    )


def document_lengths(store: TokenStore) -> np.ndarray:
    """[d] int32, tokens per document before it was cut; empty and too short ones are left out."""
    return np.concatenate([store.train.document_lengths, store.eval.document_lengths])


@dataclasses.dataclass(frozen=True)
class ModeNumbers:
    """An epoch in one mode and kind of shapes.

    Attributes:
        is_recipe: the recipe has this mode and kind.
        graphs: compiled in a run, all roles.
        steps_per_epoch: optimizer steps.
        tokens_per_step: real tokens of a step, on average.
        largest_tokens: the largest T that the shapes allow.
        memory_gb: the least memory of a step at that T.
        real_token_share, real_flop_share: of samples, as a share of those computed.
        speedup_by_flops, speedup_by_seconds: over rows padded to the longest sample; no seconds without a calibration.
    """

    mode: Mode
    kind: str
    is_recipe: bool
    graphs: int
    steps_per_epoch: int
    tokens_per_step: float
    largest_tokens: int
    memory_gb: float
    real_token_share: float
    real_flop_share: float
    speedup_by_flops: float
    speedup_by_seconds: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The modes compared on a corpus, and the advice.

    Attributes:
        recipe: as given.
        situation: the work of each pair, and all else that advice depends on.
        refused: by "mode, kind", why a pair is not possible.
        planned_on: number of samples that the work was counted on.
        mean_length: of those samples, in tokens.
        windows: see `window_trade`; rows padded to the batch maximum.
        own: whether the recipe is the user's.
    """

    recipe: Recipe
    situation: Situation
    refused: Mapping[str, str]
    planned_on: int
    mean_length: float
    windows: list[WindowTrade]
    own: bool

    @classmethod
    def of(cls, recipe: Recipe, store: TokenStore, own: bool, world_size: int = 1) -> "Comparison":
        """Plan an epoch in every mode and kind of shapes.

        Args:
            own: whether the recipe is the user's; a made-up one has no learning rate, no bench, and nothing to change.
        """
        config = recipe.model.config.with_vocab_size(store.vocab_size)
        cost, divisor = CostModel.of_decoder(config), recipe.shapes.divisor
        whole = SampleLengths.of(store)
        part = sampled(whole)
        mean = float(part.train.mean(dtype=np.float64))
        works, refused = compare_variants(recipe, part, cost, world_size)
        padded = padded_works(recipe, part, mean, world_size)
        factor = len(store.train) / part.train.size
        if factor > 1:
            works = {pair: work.scaled(factor) for pair, work in works.items()}
            padded = {name: work.scaled(factor) for name, work in padded.items()}
        documents = document_lengths(store)
        statistics = length_statistics(documents)
        pair = (recipe.mode, recipe.shapes.kind)
        buckets = recipe.shapes.row_buckets
        picked = recipe.sizes.has_row_buckets and not isinstance(buckets, list)
        calibration, note = _calibration_of(recipe, config.parameter_count()) if own else (None, None)
        situation = Situation(
            pair=pair,
            works=works,
            padded=padded,
            documents=statistics,
            cut_at_p99=cut_at(documents, round_up(math.ceil(statistics["p99"]), divisor), cost),
            counts=whole.counts,
            padded_counts=_padded_counts(recipe, whole.counts, mean),
            sizes=config,
            parameters=config.parameter_count(),
            value_bytes=2 if recipe.device.target == "Ascend" else 4,
            recompute=recipe.model.recompute,
            seq_length=recipe.model.seq_length,
            divisor=divisor,
            token_budget=recipe.batch.token_budget,
            rows=recipe.batch.rows,
            row_buckets=buckets if isinstance(buckets, list) else None,
            num_buckets=len(recipe_row_lengths(recipe, whole, cost)) if picked else None,
            max_graphs=recipe.graph.max_graphs,
            learning_rate=recipe.train.learning_rate if own else None,
            epochs=recipe.train.steps / works[pair].steps if pair in works else 1.0,
            max_memory=device_bytes(recipe.device.max_memory),
            slow_range=recipe.device.target == "Ascend",
            calibration=calibration,
            calibration_note=note,
        )
        trade = _window_trade(recipe, part, mean, world_size) if works else []
        reasons = {f"{mode}, {kind}": why for (mode, kind), why in refused.items()}
        return cls(recipe, situation, reasons, part.train.size, mean, trade, own)

    @property
    def shares(self) -> dict[str, dict[str, float]]:
        """Shares of real `tokens` and `flops`, for padded rows and for each mode that follows lengths."""
        situation, works = self.situation, self.situation.works
        compared = {f"padded_to_{name}": work for name, work in situation.padded.items()}
        compared |= {mode.value: works[mode, "range"] for mode in SHARES if (mode, "range") in works}
        cost = situation.cost
        return {name: {"tokens": work.token_share, "flops": work.flop_share(cost)} for name, work in compared.items()}

    @property
    def modes(self) -> list[ModeNumbers]:
        """The numbers of each possible pair."""
        return [self._numbers(pair, work) for pair, work in self.situation.works.items()]

    @property
    def decided_by(self) -> str:
        """The measure that pairs were compared by, in words."""
        return "calibration.json" if self.situation.calibration else "model FLOPs"

    @property
    def advice(self) -> list[Advice]:
        """Everything there is to choose; empty if the recipe's own pair is not possible."""
        if self.situation.pair not in self.situation.works:
            return []
        found = advise(self.situation)
        return found if self.own else [dataclasses.replace(advice, is_key=False) for advice in found]

    @property
    def advised_overrides(self) -> list[str]:
        """The overrides that turn the recipe into the advised mode and kind of shapes."""
        if not self.own or self.situation.pair not in self.situation.works:
            return []
        pair = choose_pair(self.situation)
        return overrides_between(self.recipe, variant(self.recipe, *pair, self.mean_length))

    def to_json(self) -> dict[str, Any]:
        """JSON values by name."""
        return {
            "shares": self.shares,
            "modes": [dataclasses.asdict(row) for row in self.modes],
            "refused": dict(self.refused),
            "planned_on_samples": self.planned_on,
            "windows": [dataclasses.asdict(row) for row in self.windows],
            "decided_by": self.decided_by,
            "calibration_note": self.situation.calibration_note,
            "advice": [advice.to_json() for advice in self.advice],
            "advised_overrides": self.advised_overrides,
        }

    def _numbers(self, pair: Pair, work: EpochWork) -> ModeNumbers:
        situation = self.situation
        gains = situation.speedup(pair, situation.padded["maximum"])
        return ModeNumbers(
            mode=pair[0],
            kind=pair[1],
            is_recipe=pair == situation.pair,
            graphs=work.graphs,
            steps_per_epoch=work.steps,
            tokens_per_step=work.tokens_per_step,
            largest_tokens=work.largest,
            memory_gb=situation.memory(work.largest)["total"] / 1e9,
            real_token_share=work.token_share,
            real_flop_share=work.flop_share(situation.cost),
            speedup_by_flops=gains["flops"],
            speedup_by_seconds=gains.get("seconds"),
        )


def _window_trade(recipe: Recipe, lengths: SampleLengths, mean_length: float, world_size: int) -> list[WindowTrade]:
    """The trade of each window, from one micro-batch (no sorting) to the whole corpus."""
    samples, divisor = lengths.train.size, recipe.shapes.divisor
    rows = rows_of(recipe, mean_length)
    row_lengths = divisor_boundaries(min(recipe.model.seq_length, lengths.longest), divisor)
    windows = [rows, *(window for window in WINDOWS if rows < window < samples), samples]
    per_step = recipe.batch.micro_batches * world_size
    return window_trade(lengths.train, rows, row_lengths, windows, per_step, recipe.train.seed)


def _padded_counts(recipe: Recipe, counts: np.ndarray, mean_length: float) -> np.ndarray:
    """How often each length is the longest of a padded micro-batch; sorted within windows, rows are alike."""
    return counts if recipe.batch.window else batch_maximum_counts(counts, rows_of(recipe, mean_length))


def _calibration_of(recipe: Recipe, parameters: int) -> tuple[Calibration | None, str | None]:
    """The calibration of the recipe's bench, or why it is not used."""
    found = read_calibration(recipe.checkpoint.output_dir)
    if found is None:
        return None, None
    bodies = {"CPU": [cpu_body()], "Ascend": ["ascend"], "auto": [cpu_body(), "ascend"]}[recipe.device.target]
    why = found.mismatch(parameters, bodies)
    return (found, None) if why is None else (None, f"calibration.json is not used: {why}; bench this recipe")


def cpu_body() -> str:
    """The body that operators probably have on this CPU; the kernels are not built to find out."""
    asked_for = shlex.split(os.environ.get("CXX", ""))[:1]
    return "kernel" if any(shutil.which(name) for name in asked_for or COMPILERS) else "reference"


def read_calibration(output_dir: Path) -> Calibration | None:
    """The calibration that a bench wrote to a folder; None if no bench was run.

    Raises:
        DataError: the file is there and cannot be used.
    """
    path = output_dir / CALIBRATION_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"a calibration must be JSON, got {error}, in {path}; bench again or remove it") from error
    if not isinstance(values, dict):
        raise DataError(f"a calibration must be a JSON object, got {type(values).__name__}, in {path}; bench again")
    return Calibration.from_dict(values, str(path))
