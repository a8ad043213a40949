"""The cells of a run, declared, compiled and counted: accumulate, apply, evaluate."""

import contextlib
import dataclasses
import functools
import gc
import importlib.metadata
import logging
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ms_varlen
from ms_varlen.batches.layout import Layout, lay_out
from ms_varlen.batches.micro_batch import Columns, MicroBatch
from ms_varlen.checkpoint.initial_weights import InitialWeights
from ms_varlen.checkpoint.store import APPLIED_STEPS
from ms_varlen.graph.compile_cache import CacheUse, compile_cache, fingerprint
from ms_varlen.graph.compile_watch import CompileWatch
from ms_varlen.graph.config import GraphConfig
from ms_varlen.graph.declare import declared_inputs
from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.key_roles import Decides, dotted, key_role
from ms_varlen.lengths import SeqLens
from ms_varlen.models.decoder import Attend, CausalLM, CausalLMLoss
from ms_varlen.ops.attention import attention_columns, check_attention_limits, declared_columns, varlen_attention
from ms_varlen.ops.body import body_in_use
from ms_varlen.ops.kernel_build import kernel_library
from ms_varlen.ranks.collectives import SumOverRanks
from ms_varlen.train.device import ASCEND
from ms_varlen.train.step import AccumulateGradients, ApplyGradients, EvaluateLoss, clear
from ms_varlen.workload.workload import Workload

logger = logging.getLogger("ms_varlen")

TOKEN_COLUMNS = ("input_ids", "labels", "position_ids")


@dataclasses.dataclass(frozen=True)
class AttentionPath:
    """An attention and what it reads.

    Attributes:
        attend: ``attend(q_TND, k_TND, v_TND, lengths)``.
        columns: makes the columns of `lengths` from a micro-batch's lengths.
        declared: the same columns as tensors without data, in the order of `lengths`, for the sizes of a graph.
        name: for the log and the compile cache.
    """

    attend: Attend
    columns: Callable[[SeqLens], Columns]
    declared: Callable[[TokenShapes], Mapping[str, Tensor]]
    name: str


def varlen_path() -> AttentionPath:
    """`varlen_attention` with the body in use, its ends declared with the shapes' limit of segments."""
    body = body_in_use()

    def declared(shapes: TokenShapes) -> dict[str, Tensor]:
        ends = declared_inputs(shapes, {"actual_seq_qlen": "G"})[0]
        columns = declared_columns(body, None if shapes.kind == "range" else shapes.max)
        return columns | {"actual_seq_qlen": ends}

    return AttentionPath(varlen_attention, functools.partial(attention_columns, body=body), declared, body)


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """What micro-batches have added up to since the last step.

    Attributes:
        losses: float64, the summed loss of each micro-batch, in nats; [micro-batches], or [ranks, micro-batches].
        supervised: tokens with a loss.
    """

    losses: np.ndarray
    supervised: int

    @property
    def loss_sum(self) -> float:
        """The loss of all micro-batches, rounded once."""
        return math.fsum(self.losses.ravel())

    @property
    def loss(self) -> float:
        """The loss per supervised token; 0 without any."""
        return self.loss_sum / max(self.supervised, 1)


class TrainingGraphs:
    """A model with its training graphs, fed with micro-batches as dicts of arrays.

    Args:
        workload: the recipe and its shapes; planned for several ranks, gradients are summed over them.
        target: "CPU" (fp32) or "Ascend" (bf16 compute, fp32 masters).
        attention: by default `varlen_attention` with the body in use.
        declare: False declares no sizes to the training cell, so that MindSpore compiles a graph for each new
            size, up to `graph.max_graphs` in all; to measure what that costs.
    Attributes:
        attention: the attention and what it reads.
        initial_weights: origin of the weights (`InitialWeights.record`); None for random ones.
        versions: of everything that numbers depend on.
    """

    def __init__(self, workload: Workload, target: str, attention: AttentionPath | None = None, declare: bool = True):
        recipe, config = workload.recipe, workload.model_config
        self._workload = workload
        self.attention = attention or varlen_path()
        self._attention_names = tuple(self.attention.declared(workload.shapes))
        dtype = "bfloat16" if target == ASCEND else "float32"
        check_attention_limits(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            dtype,
            recipe.batch.max_segments,
            self.attention.name,
        )
        weights = InitialWeights(recipe.model.init_from, config) if recipe.model.init_from else None
        model = CausalLM(
            config,
            recipe.model.max_position_embeddings,
            self.attention.attend,
            compute_dtype=getattr(ms, dtype),
            recompute=recipe.model.recompute,
            seed=recipe.train.seed,
            initial=weights.read if weights else None,
        )
        self.initial_weights = weights.record() if weights else None
        net = CausalLMLoss(model)
        # One cell for each static size of T (`set_inputs` is per cell), or one for a range.
        first, *others = workload.shapes.sizes or (None,)
        self.accumulate_cell = AccumulateGradients(net)
        self._accumulate_cells: dict[int | None, AccumulateGradients] = {first: self.accumulate_cell}
        for size in others:
            self._accumulate_cells[size] = AccumulateGradients(net, self.accumulate_cell)
        # Planned for several ranks, it is trained by as many.
        exchange = SumOverRanks() if workload.plans.settings.world_size > 1 else None
        self.apply_cell = ApplyGradients(
            self.accumulate_cell.weights, self.accumulate_cell.accumulated, recipe.train, exchange
        )
        self.evaluate_cell = EvaluateLoss(net)
        for cell in self._accumulate_cells.values():
            cell.set_train()
        self.evaluate_cell.set_train(False)
        self._watch = self._declare(declare)
        self.versions = {
            "mindspore": ms.__version__,
            "ms_varlen": ms_varlen.__version__,
            "numpy": importlib.metadata.version("numpy"),
            "python": platform.python_version(),
            "attention": self.attention.name,
        }

    def _declare(self, declare: bool) -> CompileWatch:
        """Declare each cell's sizes and predict its graphs."""
        workload = self._workload
        graph, expected = workload.recipe.graph, workload.predicted_graphs
        if not declare:
            expected["train"] += graph.max_graphs - sum(expected.values())
        elif graph.mode == "graph":
            for size, cell in self._accumulate_cells.items():
                self._set_inputs(cell, workload.shapes if size is None else workload.shapes.of_size(size))
            self._set_inputs(self.evaluate_cell, workload.eval_shapes)
        roles: dict[str, tuple[nn.Cell, ...]] = {
            "train": tuple(self._accumulate_cells.values()),
            "apply": (self.apply_cell,),
            "eval": (self.evaluate_cell,),
        }
        self._roles = {role: roles[role] for role in expected}
        return CompileWatch(self._roles, expected, graph.max_graphs)

    def _set_inputs(self, cell: nn.Cell, shapes: TokenShapes) -> None:
        tokens = declared_inputs(shapes, dict.fromkeys(TOKEN_COLUMNS, "T"))
        cell.set_inputs(*tokens, *self.attention.declared(shapes).values())

    def compile(self) -> None:
        """Compile every graph, in a fixed order; `compile_graphs` puts the compile cache around it."""
        workload = self._workload
        for size, cell in self._accumulate_cells.items():
            cell.compile(*self._tensors(self._made_up_micro_batch(workload.layout, size)))
            self._watch.check(workload.shapes.describe() if size is None else f"T={size}")
        self.apply_cell.compile(*_scalars(0.0, 1.0, 0.0, 0.0))
        self._watch.check("fixed shapes")
        if "eval" in self._roles:
            size = workload.eval_shapes.sizes[0] if workload.eval_shapes.sizes else None
            self.evaluate_cell.compile(*self._tensors(self._made_up_micro_batch(workload.eval_layout, size)))
            self._watch.check(workload.eval_shapes.describe())

    def parts(self) -> dict[str, Any]:
        """Return everything that decides the graphs, as JSON values; data, schedule and folders do not."""
        recipe = dotted(self._workload.recipe.resolved())
        return {
            "recipe": {key: value for key, value in recipe if Decides.GRAPH in key_role(key).decides},
            "layout": dataclasses.asdict(self._workload.layout),
            "shapes": dataclasses.asdict(self._workload.shapes),
            "model_config": self._workload.model_config.model_dump(mode="json"),  # with the vocabulary
            "attention": self.attention.name,
            "roles": list(self._roles),
        }

    def _made_up_micro_batch(self, layout: Layout, size: int | None) -> Columns:
        """Return columns of the right shapes for a graph of this T, or of any T; compiling reads only shapes."""
        lens = layout.place(np.ones(1, np.int32)) if size is None else layout.made_up(size)
        return {**lay_out(lens, np.zeros(lens.real_tokens, np.int32), 0), **self.attention.columns(lens)}

    def _tensors(self, columns: Mapping[str, np.ndarray]) -> tuple[Tensor, ...]:
        return tuple(Tensor(columns[name]) for name in (*TOKEN_COLUMNS, *self._attention_names))

    def accumulate(self, micro_batch: Mapping[str, np.ndarray]) -> Tensor:
        """Add the gradient of a micro-batch. Return () fp32, its summed loss."""
        tokens = micro_batch["input_ids"].size
        loss_sum = self._accumulate_cells.get(tokens, self.accumulate_cell)(*self._tensors(micro_batch))
        self._watch.check(f"T={tokens}")
        return loss_sum

    def accumulate_all(self, micro_batches: Sequence[MicroBatch]) -> Accumulated:
        """Add the gradients of several micro-batches, which are all started before the first loss is read."""
        losses = [self.accumulate(micro_batch) for micro_batch in micro_batches]
        return Accumulated(
            np.array([float(loss.asnumpy()) for loss in losses]), sum(one.supervised for one in micro_batches)
        )

    def step(self, micro_batches: Sequence[MicroBatch], rate: float) -> Accumulated:
        """Train one step of one process. With ranks the loop adds up over them between the two calls."""
        accumulated = self.accumulate_all(micro_batches)
        self.apply(rate, accumulated)
        return accumulated

    def apply(self, rate: float, accumulated: Accumulated) -> tuple[float, bool]:
        """Apply the accumulated gradient. Return its global norm, and whether it was finite and applied.

        A step without supervised tokens has no gradient and changes nothing.
        """
        if accumulated.supervised == 0:
            return 0.0, False
        norm, finite = self.apply_cell(*_scalars(rate, accumulated.supervised, accumulated.loss_sum, 0.0))
        applied = bool(finite.asnumpy())
        if not applied:
            self.clear_gradients()
        return float(norm.asnumpy()), applied

    def has_finite_gradient(self, columns: Mapping[str, np.ndarray]) -> bool:
        """Return whether a micro-batch's gradient alone is finite. The accumulators must be zero; they end so."""
        self.accumulate(columns)
        accumulated = self.accumulate_cell.accumulated
        finite = all(bool(ops.isfinite(gradient).all().asnumpy()) for gradient in accumulated)
        self.clear_gradients()
        return finite

    def evaluate(self, columns: Mapping[str, np.ndarray]) -> Tensor:
        """Return () fp32, a micro-batch's summed loss."""
        loss_sum = self.evaluate_cell(*self._tensors(columns))
        self._watch.check(f"T={columns['input_ids'].size}")
        return loss_sum

    @property
    def predicted(self) -> int:
        """The number of graphs, all roles together."""
        return self._watch.predicted

    def counts(self) -> dict[str, int]:
        """Graphs compiled so far, by role."""
        return self._watch.counts()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each parameter."""
        return {weight.name: tuple(weight.shape) for weight in self.accumulate_cell.weights}

    def weights(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Copies of the fp32 masters, and of AdamW's moments and step counter, by name (host)."""
        cell = self.apply_cell
        optimizer = {p.name: p.asnumpy().copy() for p in (*cell.adam_m, *cell.adam_v)}
        optimizer[APPLIED_STEPS] = np.array(int(cell.applied_steps.asnumpy()), np.int64)
        return self.model_weights(), optimizer

    def each_state(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) for every tensor that a checkpoint stores. Arrays are valid only until the next step."""
        cell = self.apply_cell
        states = (*self.accumulate_cell.weights, *cell.adam_m, *cell.adam_v, cell.applied_steps)
        return ((state.name, state.asnumpy()) for state in states)

    def model_weights(self) -> dict[str, np.ndarray]:
        """Copies of the fp32 masters by name (host)."""
        return {weight.name: weight.asnumpy().copy() for weight in self.accumulate_cell.weights}

    def set_weights(self, model: Mapping[str, np.ndarray]) -> None:
        """Set the weights, by name."""
        for weight in self.accumulate_cell.weights:
            _set(weight, model[weight.name])

    def clear_gradients(self) -> None:
        """Zero the accumulated gradient."""
        clear(self.accumulate_cell.accumulated)

    def load(self, model: Mapping[str, np.ndarray], optimizer: Mapping[str, np.ndarray]) -> None:
        """Set saved weights, moments and step counter, whose names and shapes the reader has checked."""
        cell = self.apply_cell
        self.set_weights(model)
        for moment in (*cell.adam_m, *cell.adam_v):
            _set(moment, optimizer[moment.name])
        _set(cell.applied_steps, optimizer[APPLIED_STEPS].astype(np.float32))

    def gradients(self) -> dict[str, np.ndarray]:
        """Copies of the accumulated gradient sums, by parameter name (host)."""
        cell = self.accumulate_cell
        return {w.name: g.asnumpy().copy() for w, g in zip(cell.weights, cell.accumulated, strict=True)}


def compile_graphs(graph: GraphConfig, *sets: TrainingGraphs) -> CacheUse | None:
    """Compile all graphs of a process through the compile cache; do nothing in PyNative mode.

    Args:
        graph: the `graph` section.
        sets: the graphs, in an order that every run of these recipes keeps; a process can use the cache once.
    """
    if graph.mode != "graph":
        return None
    begin = time.perf_counter()
    library = kernel_library() if body_in_use() == "kernel" else None
    name = fingerprint({"sets": [graphs.parts() for graphs in sets]}, library)
    with compile_cache(graph.compile_cache, name) as use, _objects_of_start_kept():
        for graphs in sets:
            logger.info(
                "compiling %d graphs (attention: %s); these first seconds are normal",
                graphs.predicted,
                graphs.attention.name,
            )
            graphs.compile()
    logger.info("compiled in %.1f s (compile cache %s)", time.perf_counter() - begin, use.state)
    return use


@contextlib.contextmanager
def _objects_of_start_kept() -> Iterator[None]:
    """Keep modules out of garbage collection, which MindSpore runs before each graph: saves 0.1 s a graph."""
    frozen_by_caller = gc.get_freeze_count() > 0
    if not frozen_by_caller:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen_by_caller:
            gc.unfreeze()


def _scalars(*values: float) -> tuple[Tensor, ...]:
    return tuple(Tensor(value, ms.float32) for value in values)


def _set(parameter: Parameter, value: np.ndarray) -> None:
    # In place: `Parameter.set_data` gives the parameter other memory, and a graph that has updated the weights once
    # keeps updating the old: losses are then wrong without an error (MindSpore 2.9, CPU).
    ops.assign(parameter, Tensor(value))
