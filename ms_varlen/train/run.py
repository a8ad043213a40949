"""One training run from a recipe: corpus, plan, device, graphs, loop, files."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_varlen.checkpoint.run_dir import Run, open_run
from ms_varlen.checkpoint.store import write_atomically
from ms_varlen.data.store import Progress
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import TrainingGraphs, compile_graphs
from ms_varlen.train.loop import TrainingLoop
from ms_varlen.train.recipe import Recipe
from ms_varlen.train.workload import describe_plan, prepare

logger = logging.getLogger("ms_varlen")

PLAN_FILE = "plan.json"


def train(
    recipe: Recipe, on_step: Callable[[dict[str, Any]], None], progress: Progress | None = None
) -> dict[str, Any]:
    """Train to `train.steps`, going on from the newest checkpoint where the recipe says so.

    Args:
        recipe: a valid recipe.
        on_step: told each step's metrics.
        progress: told how far the token store is, where one is built.
    Returns:
        the last step's metrics, `run_folder`, `first_step` (steps that were done before), `compile_cache` and, where
        steps ran, the `ledger` of the epoch in progress.
    Raises:
        VarlenError: whatever the user can mend.
    """
    workload = prepare(recipe, progress)
    graphs = TrainingGraphs(workload, set_up_device(recipe.device, recipe.graph))
    with open_run(recipe.checkpoint, recipe.mode, recipe.resolved(), graphs.parameter_shapes()) as run:
        write_atomically(run.folder / PLAN_FILE, [json.dumps(describe_plan(workload), indent=1).encode()])
        loop = TrainingLoop(workload, graphs, run, on_step)
        first_step = loop.step
        if first_step == recipe.train.steps:
            logger.info("%s has its %d steps already; raise train.steps to go on", run.folder, first_step)
            return {**last_metrics(run), "run_folder": str(run.folder), "first_step": first_step, "compile_cache": None}
        cache = compile_graphs(recipe.graph, graphs)
        summary = loop.run()
        return {
            **summary,
            "run_folder": str(run.folder),
            "first_step": first_step,
            "compile_cache": cache.state if cache else None,
        }


def last_metrics(run: Run) -> dict[str, Any]:
    """The last line of a run's metrics."""
    lines = Path(run.metrics_path).read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1]) if lines else {}
