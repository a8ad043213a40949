"""One training run from a recipe: device, ranks, corpus, plan, graphs, loop, files.

Under msrun every rank runs this. Each stage ends when all ranks have done it. So an error on one rank stops all ranks
with its message, and no rank waits in a gradient exchange while another compiles.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms

import ms_varlen
from ms_varlen.checkpoint.run_folder import Run, follow_run, open_run
from ms_varlen.data.store.store import Progress
from ms_varlen.files import write_atomically
from ms_varlen.key_roles import dotted, key_role
from ms_varlen.ranks.collectives import gather_words
from ms_varlen.ranks.exchange import Exchange, connect
from ms_varlen.ranks.join import join_ranks
from ms_varlen.ranks.shared_plans import plans_of_node
from ms_varlen.ranks.stop import StopRequest
from ms_varlen.recipe.recipe import Recipe
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import TrainingGraphs, compile_graphs
from ms_varlen.train.loop import TrainingLoop
from ms_varlen.workload.summary import PlanSummary
from ms_varlen.workload.workload import Workload, prepare

logger = logging.getLogger("ms_varlen")

PLAN_FILE = "plan.json"


def train(
    recipe: Recipe, on_step: Callable[[dict[str, Any]], None], progress: Progress | None = None
) -> dict[str, Any]:
    """Train to `train.steps`; resume from the newest checkpoint if `checkpoint.resume` allows it.

    Args:
        recipe: a valid recipe.
        on_step: called with each step's metrics.
        progress: called with the progress of the token store, if one is built.
    Returns:
        the last step's metrics, `run_folder`, `first_step` (steps that were done before), `rank`, `compile_cache` and,
        if steps ran, `stopped` (on request) and the `ledger` of the epoch in progress.
    Raises:
        VarlenError: any fault that the user can fix.
        KeyboardInterrupt: a request to stop came before the run's first step.
    """
    target = set_up_device(recipe.device, recipe.graph)
    ranks = join_ranks(recipe.device)
    stop = StopRequest()
    stop.listen(ranks.rank)
    # The ranks of a node have one parent, msrun; a single process shares its plans with nobody.
    sharing = plans_of_node(os.getppid()) if ranks.size > 1 else contextlib.nullcontext()
    with (
        sharing as share,
        contextlib.closing(connect(ranks, gather_words, recipe.device.hccl_exec_seconds)) as exchange,
    ):
        workload = exchange.together(lambda: prepare(recipe, progress, ranks.size, share))
        exchange.agree(_identity(workload))
        graphs = exchange.together(lambda: TrainingGraphs(workload, target))
        with _open_run(workload, graphs, exchange) as run:
            if ranks.writes:
                record = {**PlanSummary.of(workload).to_json(), "initial_weights": graphs.initial_weights}
                write_atomically(run.folder / PLAN_FILE, [json.dumps(record, indent=1).encode()])
            loop = exchange.together(lambda: TrainingLoop(workload, graphs, run, on_step, exchange, stop))
            first = {"run_folder": str(run.folder), "first_step": loop.step, "rank": ranks.rank}
            if loop.step == recipe.train.steps:
                logger.info("%s has its %d steps already; raise train.steps to continue", run.folder, loop.step)
                return {**last_metrics(run), **first, "compile_cache": None}
            cache = exchange.together(lambda: compile_graphs(recipe.graph, graphs))
            return {**loop.run(), **first, "compile_cache": cache.state if cache else None}


def _identity(workload: Workload) -> dict[str, Any]:
    """Return everything that must be the same on all ranks, before they do anything else together."""
    store, recipe = workload.store, dotted(workload.recipe.resolved())
    return {
        "recipe": {key: value for key, value in recipe if not key_role(key).may_differ},
        "corpus": {
            "samples": len(store.train),
            "tokens": store.train.total_tokens,
            "eval_samples": len(store.eval),
            "fingerprint": store.fingerprint,
        },
        "plan": workload.plans.fingerprint,
        "versions": {"ms_varlen": ms_varlen.__version__, "mindspore": ms.__version__},
    }


def _open_run(workload: Workload, graphs: TrainingGraphs, exchange: Exchange) -> Run:
    """Open the run folder on rank 0; the other ranks load the same checkpoint."""
    recipe, shapes = workload.recipe, graphs.parameter_shapes()

    def opened() -> Run | None:
        if not exchange.ranks.writes:
            return None
        return open_run(recipe.checkpoint, recipe.mode, recipe.resolved(), shapes, workload.store.fingerprint)

    run = exchange.together(opened)
    message = {}
    if run is not None:
        checkpoint = str(run.checkpoint.path.resolve()) if run.checkpoint else None
        message = {"folder": str(run.folder), "checkpoint": checkpoint, "replanned": run.replanned}
    opening = exchange.messages(message)[0]

    def followed() -> Run:
        if run is not None:
            return run
        path = Path(opening["checkpoint"]) if opening["checkpoint"] else None
        return follow_run(Path(opening["folder"]), path, opening["replanned"], recipe.mode, shapes)

    run = exchange.together(followed)
    manifest = run.checkpoint.manifest if run.checkpoint else None
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    exchange.agree({"checkpoint": digest, "initial_weights": graphs.initial_weights})
    return run


def last_metrics(run: Run) -> dict[str, Any]:
    """Return the last line of a run's metrics; empty if there is none."""
    lines = Path(run.metrics_path).read_text(encoding="utf-8").splitlines()
    return json.loads(lines[-1]) if lines else {}
