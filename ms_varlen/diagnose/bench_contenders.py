"""Who takes part in a bench, and how each of our own lays out the steps. Imports no MindSpore.

The steps are those of the recipe's plan: the same samples for everybody. Adding a contender of our own is a row in
`OURS` and its case in `contender_workload`; a peer is a row in `PEERS` and its module.
"""

import dataclasses
import importlib.util
from collections.abc import Callable

import numpy as np

from ms_varlen.data.layouts import Layout
from ms_varlen.data.store import Progress
from ms_varlen.errors import RecipeError
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.planning.windows import divisor_boundaries
from ms_varlen.train.recipe import Recipe
from ms_varlen.train.workload import Workload, prepare

Parts = list[list[np.ndarray]]
"""[step][micro-batch] -> [B] sample ids."""

MOST_ROWS = 16
"""Rows of a padded micro-batch; a step of more samples takes several."""

RATE = "matrix_product"


@dataclasses.dataclass(frozen=True)
class Contender:
    """One row of the bench.

    Attributes:
        label: for people.
        module: what its process runs.
        variant: what the module is told to be.
        needs: packages that must be installed.
        install: the command that brings them.
        baseline: others are compared with it.
        steps: timed steps that it takes part in; None is all of them.
    """

    label: str
    module: str = "ms_varlen.diagnose.bench_worker"
    variant: str = ""
    needs: tuple[str, ...] = ()
    install: str = ""
    baseline: bool = False
    steps: int | None = None

    @property
    def missing(self) -> bool:
        """Whether a package that it needs is not installed."""
        return any(importlib.util.find_spec(package) is None for package in self.needs)


OURS = {
    "varlen_range": Contender("varlen, one graph for a range of T"),
    "varlen_static": Contender("varlen, one size of T: the largest of these steps"),
    "padded": Contender("padded to seq_length", baseline=True),
    "padded_batch": Contender("padded to the batch maximum (dynamic shape without lengths)", baseline=True),
    # A graph takes seconds and memory: a few steps show it.
    "varlen_recompile": Contender("lengths without dynamic shape, compiling for each new size", steps=3),
}


def _torch(label: str, variant: str) -> Contender:
    install = "pip install torch==2.13.0 transformers==4.57.1"
    return Contender(label, "ms_varlen.diagnose.bench_torch", variant, ("torch", "transformers"), install)


def _mindformers(label: str, variant: str, steps: int | None = None) -> Contender:
    install = "pip install mindformers==1.9.0"
    return Contender(label, "ms_varlen.diagnose.bench_mindformers", variant, ("mindformers",), install, steps=steps)


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


def bench_workload(recipe: Recipe, progress: Progress | None = None) -> Workload:
    """The recipe's corpus and plan, evaluation left out.

    Raises:
        RecipeError: no varlen recipe; its plan is what every contender runs.
        DataError: the corpus cannot be used.
    """
    if recipe.mode != "varlen":
        raise RecipeError([f"mode: must be varlen for a bench, which pads the same steps too, got {recipe.mode}"])
    train = recipe.train.model_copy(update={"eval_every": None})
    return prepare(recipe.model_copy(update={"train": train}), progress)


def step_parts(workload: Workload, steps: int) -> Parts:
    """Sample ids of the first `steps` steps of the plan."""
    places = workload.plan_steps(workload.plans.start(), steps)
    micro_batches = range(workload.recipe.batch.micro_batches)
    return [[plan.micro_batch(state.step, m) for m in micro_batches] for state, plan in places]


def contender_workload(name: str, workload: Workload, parts: Parts) -> tuple[Workload, Parts]:
    """How one of `OURS` lays out the steps.

    Returns:
        the workload with its shapes and layout, and the steps in its micro-batches.
    """
    if not name.startswith("padded"):
        shapes = _varlen_shapes(name, workload, parts)
        layout = Layout("varlen", shapes, workload.recipe.model.seq_length)
        return dataclasses.replace(workload, shapes=shapes, layout=layout), parts
    parts = in_rows(parts)
    rows = max(ids.size for step in parts for ids in step)
    seq_length, divisor = workload.recipe.model.seq_length, workload.recipe.shapes.divisor
    if name == "padded":
        shapes = TokenShapes("static", rows * seq_length, rows * seq_length, rows, rows)
        layout = Layout("padded", shapes, seq_length, rows=rows, row_lengths=(seq_length,))
    else:
        longest = round_up(seq_length, divisor)
        largest = max(longest, 2 * divisor)  # a range must be open
        shapes = TokenShapes("range", rows * divisor, rows * largest, rows * divisor, rows)
        row_lengths = tuple(divisor_boundaries(longest, divisor).tolist())
        layout = Layout("padded", shapes, longest, rows=rows, row_lengths=row_lengths)
    return dataclasses.replace(workload, shapes=shapes, layout=layout), parts


def in_rows(parts: Parts) -> Parts:
    """The steps dealt out anew, in micro-batches of as many samples as give the fewest empty rows."""
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
    if name == "varlen_static":
        lengths = np.asarray(workload.store.train.lengths)
        tokens = max(int(lengths[ids].sum(dtype=np.int64)) for step in parts for ids in step)
        shapes = TokenShapes("static", tokens, tokens, divisor, segments)
        return dataclasses.replace(shapes, max_segments=segments + shapes.tail_segments(recipe.model.seq_length))
    largest = max(budget, 2 * divisor)  # a range must be open
    # Graphs are compiled with a made-up micro-batch of one token and a tail of the largest size.
    return TokenShapes("range", smallest, largest, divisor, max(segments, 1 + -(-largest // recipe.model.seq_length)))
