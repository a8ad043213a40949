"""The loss of given samples in the layout of a mode, for weights from anywhere. Imports MindSpore."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ckpt_tools.weights import Weights
from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.modes import Mode
from ms_varlen.planning.plan import EpochPlan
from ms_varlen.train.device import set_up_device
from ms_varlen.train.graphs import TrainingGraphs
from ms_varlen.workload.translation import variant
from ms_varlen.workload.workload import Workload, prepare_on


def step_samples(workload: Workload, steps: int) -> list[np.ndarray]:
    """Sample ids of each of the first steps of a plan, ascending."""
    places = workload.plan_steps(workload.plans.start(), steps)
    return [np.sort(plan.step_ids(state.step)) for state, plan in places]


class LossOfMode:
    """Computes losses in the layout of a mode.

    Args:
        workload: of a recipe; its corpus and model are taken.
        mode: of the layout; sizes are translated where it is not the recipe's.
    """

    def __init__(self, workload: Workload, mode: Mode):
        recipe, store = workload.recipe, workload.store
        if mode is not recipe.mode:
            mean = float(np.asarray(store.train.lengths).mean(dtype=np.float64))
            workload = prepare_on(variant(recipe, mode, recipe.shapes.kind, mean), store)
        self.mode = mode
        self._workload = workload
        self._graphs = TrainingGraphs(workload, set_up_device(recipe.device, recipe.graph))
        layout, columns = workload.eval_layout, self._graphs.attention.columns
        self._batches = MicroBatches(store.train, layout, store.pad_id, columns)

    def compute(self, weights: Weights, samples: list[np.ndarray]) -> Iterator[float]:
        """Loss per supervised token, in nats, of each list of sample ids."""
        self._graphs.set_weights({name: tensor.read_float() for name, tensor in weights.model.items()})
        settings = dataclasses.replace(self._workload.plans.settings, micro_batches=1, world_size=1)
        for ids in samples:
            plan = EpochPlan(self._workload.store.train.lengths, settings, None, ids)
            loss_sum, supervised = 0.0, 0
            for step in range(plan.num_steps):
                micro_batch = self._batches.micro_batch(plan.micro_batch(step, 0))
                loss_sum += float(self._graphs.evaluate(micro_batch).asnumpy())
                supervised += micro_batch.supervised
            yield loss_sum / max(supervised, 1)
