"""Who takes part in a bench, and how each of our own lays out the steps.

The steps are those of the recipe's plan: the same samples for everybody. Adding a contender of our own is a row in
`OURS` and its case in `contender_workload`; a peer is a row in `PEERS` and its module. A step of samples [5 6 7] [8 9]
for a `seq_length` of 4 and a divisor of 2::

    varlen_range   5 6 7 8 9 .                packed    5 6 7 .   8 9 . .     (two micro-batches)
    padded         5 6 7 . 8 9 . .            bucketed  5 6 7 .   8 9         (two micro-batches)
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable

import numpy as np

from ms_varlen.batches.layout import Layout
from ms_varlen.batches.samples import Samples
from ms_varlen.data.store.store import Progress
from ms_varlen.errors import RecipeError
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.modes import Mode
from ms_varlen.planning.buckets import bucket_of
from ms_varlen.planning.cost import CostModel
from ms_varlen.planning.packing import pack_best_fit
from ms_varlen.planning.rows import divisor_boundaries
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.workload.sizes import SampleLengths, auto_row_lengths
from ms_varlen.workload.workload import Workload, prepare

Parts = list[list[np.ndarray]]
"""[step][micro-batch] -> [B] sample ids."""
Sample = tuple[np.ndarray, np.ndarray]
"""[length] int32 token ids and [length] int32 labels, not shifted: the token's own id, -100 where there is no loss."""

MOST_ROWS = 16
"""Rows of a padded micro-batch; a step of more samples takes several."""

RATE = "matrix_product"
OURS_GROUP = "ours"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the bench.

    Attributes:
        label: for people.
        module: what its process runs.
        variant: the variant of the module.
        needs: packages that must be installed.
        install: the command that brings them.
        baseline: others are compared with it.
        steps: timed steps that it takes part in; None is all of them.
        group: contenders of one group are in memory at once and take turns. Every group runs `MAIN` too, by which the
            groups are compared.
    """

    label: str
    module: str = "ms_varlen.diagnose.bench.worker"
    variant: str = ""
    needs: tuple[str, ...] = ()
    install: str = ""
    baseline: bool = False
    steps: int | None = None
    group: str = OURS_GROUP

    @property
    def missing(self) -> bool:
        """Whether a package that it needs is not installed."""
        return any(importlib.util.find_spec(package) is None for package in self.needs)


OURS = {
    "varlen_range": Contender("varlen, one graph for a range of T"),
    "varlen_static": Contender("varlen, one size of T: the largest of these steps"),
    "packed": Contender("packed to seq_length, with lengths (TND)"),
    "packed_dense": Contender("packed to seq_length, under a dense isolating mask"),
    "bucketed": Contender("rows of bucket sizes, with lengths"),
    "padded": Contender("padded to seq_length", baseline=True),
    "padded_batch": Contender("padded to the batch maximum (dynamic shape without lengths)", baseline=True),
    # A graph takes seconds and memory: a few steps show it.
    "varlen_recompile": Contender("lengths without dynamic shape, compiling for each new size", steps=3),
}

MAIN = "varlen_range"
"""The contender that losses are compared with, that runs in every group, and that the calibration is fitted to."""

EQUAL = "varlen_equal"
"""A static graph of the very T of `middle_step`, which only that step's comparison with `MAIN` runs."""


def _torch(label: str, variant: str) -> Contender:
    install = "pip install torch==2.13.0 transformers==4.57.1"
    needs = ("torch", "transformers")
    return Contender(label, "ms_varlen.diagnose.bench.torch_peer", variant, needs, install, group="torch")


def _mindformers(label: str, variant: str, steps: int | None = None) -> Contender:
    install, module = "pip install mindformers==1.9.0", "ms_varlen.diagnose.bench.mindformers_peer"
    # Each takes about 10 GB.
    group = f"mindformers_{variant}"
    return Contender(label, module, variant, ("mindformers",), install, steps=steps, group=group)


PEERS = {
    "torch": {
        "torch_padded": _torch("PyTorch, padded to the batch maximum", "padded"),
        "torch_packed": _torch("PyTorch, packed, SDPA with a block-diagonal mask", "packed"),
        "torch_segments": _torch("PyTorch, packed, SDPA segment by segment", "segments"),
        "torch_each": _torch("PyTorch, one sequence at a time", "each"),
    },
    "mindformers": {
        "mindformers_batch": _mindformers("MindFormers, padded to the batch maximum (dynamic)", "batch"),
        "mindformers_padded": _mindformers("MindFormers, padded to seq_length (static)", "padded", steps=3),
    },
}


def bench_workload(recipe: Recipe, progress: Progress | None = None, world_size: int = 1) -> Workload:
    """The recipe's corpus and plan for so many ranks, evaluation left out.

    Raises:
        RecipeError: no varlen recipe; its plan is what every contender runs.
        DataError: the corpus cannot be used.
    """
    if recipe.mode is not Mode.VARLEN:
        raise RecipeError([f"mode: must be varlen for a bench, which pads the same steps too, got {recipe.mode}"])
    train = recipe.train.model_copy(update={"eval_every": None})
    return prepare(recipe.model_copy(update={"train": train}), progress, world_size)


def step_parts(workload: Workload, steps: int, rank: int = 0) -> Parts:
    """Sample ids of the first `steps` steps of the plan, of one rank."""
    places = workload.plan_steps(workload.plans.start(), steps)
    micro_batches = range(workload.recipe.batch.micro_batches)
    return [[plan.micro_batch(state.step, m, rank) for m in micro_batches] for state, plan in places]


def samples_of(table: Samples, ids: np.ndarray) -> list[Sample]:
    """The samples `ids` [k] as a peer takes them; the first label of each is -100, for nothing comes before it."""
    lengths = table.lengths[ids]
    tokens, supervised = table.gather(ids), table.gather_supervised(ids)
    labels = tokens.copy() if supervised is None else np.where(supervised, tokens, IGNORE_INDEX).astype(np.int32)
    ends = np.cumsum(lengths)
    labels[ends - lengths] = IGNORE_INDEX
    return list(zip(np.split(tokens, ends[:-1]), np.split(labels, ends[:-1]), strict=True))


def num_targets(samples: Iterable[Sample]) -> int:
    """Tokens with a loss."""
    return sum(int(np.count_nonzero(labels != IGNORE_INDEX)) for _, labels in samples)


def contender_workload(name: str, workload: Workload, parts: Parts) -> tuple[Workload, Parts]:
    """How one of `OURS`, or `EQUAL`, lays out the steps.

    Returns:
        the workload with its shapes and layout, and the steps in its micro-batches.
    """
    if name.startswith("padded"):
        return _padded(name, workload, parts)
    if name.startswith("packed"):
        return _packed(workload, parts)
    if name == "bucketed":
        return _bucketed(workload, parts)
    shapes = _varlen_shapes(name, workload, parts)
    layout = Layout(Mode.VARLEN, shapes, workload.recipe.model.seq_length)
    workload = dataclasses.replace(workload, shapes=shapes, layout=layout)
    if name == "varlen_recompile":
        graphs = 1 + sum(len(step) for step in parts)
        graph = workload.recipe.graph.model_copy(update={"max_graphs": graphs})
        workload = dataclasses.replace(workload, recipe=workload.recipe.model_copy(update={"graph": graph}))
    return workload, parts


def _padded(name: str, workload: Workload, parts: Parts) -> tuple[Workload, Parts]:
    parts = in_rows(parts)
    rows = max(ids.size for step in parts for ids in step)
    seq_length, divisor = workload.recipe.model.seq_length, workload.recipe.shapes.divisor
    if name == "padded":
        shapes = TokenShapes("static", rows * seq_length, rows * seq_length, rows, rows)
        layout = Layout(Mode.PADDED, shapes, seq_length, rows=rows, row_lengths=(seq_length,))
    else:
        longest = round_up(seq_length, divisor)
        largest = max(longest, 2 * divisor)  # a range must be open
        shapes = TokenShapes("range", rows * divisor, rows * largest, rows * divisor, rows)
        row_lengths = tuple(divisor_boundaries(longest, divisor).tolist())
        layout = Layout(Mode.PADDED, shapes, longest, rows=rows, row_lengths=row_lengths)
    return dataclasses.replace(workload, shapes=shapes, layout=layout), parts


def _packed(workload: Workload, parts: Parts) -> tuple[Workload, Parts]:
    """Each step in as few packs of `seq_length` tokens as there can be, a micro-batch each."""
    seq_length, lengths = workload.recipe.model.seq_length, np.asarray(workload.store.train.lengths)
    parts = [in_packs(np.concatenate(step), lengths, seq_length) for step in parts]
    most = 1 + max(ids.size for step in parts for ids in step)  # and the padded tail
    shapes = TokenShapes("static", seq_length, seq_length, 1, most)
    return dataclasses.replace(workload, shapes=shapes, layout=Layout(Mode.PACKED, shapes, seq_length)), parts


def in_packs(ids: np.ndarray, lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Sample ids in packs of at most `capacity` tokens."""
    packs = pack_best_fit(lengths[ids], capacity, ids.size)
    return np.split(ids[packs.order], packs.offsets[1:-1])


def _bucketed(workload: Workload, parts: Parts) -> tuple[Workload, Parts]:
    """Each step in rows of a few lengths, those of one length in a micro-batch; the lengths suit the whole corpus."""
    recipe, lengths = workload.recipe, np.asarray(workload.store.train.lengths)
    divisor, chosen = recipe.shapes.divisor, recipe.shapes.row_buckets
    if not isinstance(chosen, list):
        of_row = CostModel.of_decoder(workload.model_config).of_row
        chosen = list(auto_row_lengths(recipe, SampleLengths.of(workload.store), of_row))
    parts = [in_buckets(np.concatenate(step), lengths, np.array(chosen)) for step in parts]
    most = max(ids.size for step in parts for ids in step)
    shapes = TokenShapes("range", divisor, max(most * chosen[-1], 2 * divisor), divisor, 2 * most)
    layout = Layout(Mode.BUCKETED, shapes, chosen[-1], row_lengths=tuple(chosen))
    return dataclasses.replace(workload, shapes=shapes, layout=layout), parts


def in_buckets(ids: np.ndarray, lengths: np.ndarray, boundaries: np.ndarray) -> list[np.ndarray]:
    """Sample ids of each bucket that has any."""
    buckets = bucket_of(lengths[ids], boundaries)
    return [ids[buckets == bucket] for bucket in np.unique(buckets)]


def middle_step(workload: Workload, parts: Parts) -> int:
    """The step whose first micro-batch is the median in tokens."""
    lengths = np.asarray(workload.store.train.lengths)
    tokens = [int(lengths[step[0]].sum(dtype=np.int64)) for step in parts]
    return int(np.argsort(tokens, kind="stable")[len(tokens) // 2])


def in_rows(parts: Parts) -> Parts:
    """The steps dealt out again, in micro-batches of as many samples as give the fewest empty rows."""
    steps = [np.concatenate(step) for step in parts]
    rows = _fewest_empty_rows([ids.size for ids in steps])
    return [[ids[start : start + rows] for start in range(0, ids.size, rows)] for ids in steps]


def _fewest_empty_rows(counts: list[int]) -> int:
    most = min(max(counts), MOST_ROWS)
    computed: Callable[[int], int] = lambda rows: sum(round_up(count, rows) for count in counts)  # noqa: E731
    return min(range(most, most // 2, -1), key=computed)  # the larger of equals


def _varlen_shapes(name: str, workload: Workload, parts: Parts) -> TokenShapes:
    recipe = workload.recipe
    divisor, budget, segments = recipe.shapes.divisor, recipe.batch.size, recipe.batch.max_segments
    smallest = recipe.shapes.min or divisor
    if name in ("varlen_static", EQUAL):
        lengths = np.asarray(workload.store.train.lengths)
        shown = [parts[middle_step(workload, parts)][:1]] if name == EQUAL else parts
        tokens = max(smallest, *(int(lengths[ids].sum(dtype=np.int64)) for step in shown for ids in step))
        shapes = TokenShapes("static", tokens, tokens, divisor, segments)
        return dataclasses.replace(shapes, max_segments=segments + shapes.tail_segments(recipe.model.seq_length))
    largest = max(budget, 2 * divisor)  # a range must be open
    # Graphs are compiled with a made-up micro-batch of one token and a tail of the largest size.
    return TokenShapes("range", smallest, largest, divisor, max(segments, 1 + -(-largest // recipe.model.seq_length)))
