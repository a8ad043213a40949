"""Faults between ranks, and of the device that lengths lie on: who names them.

Ranks are threads here, with the exchange that training has between processes; the NPU is the strict emulator.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.errors import VarlenError
from ms_varlen.ops import ascend_attention
from ms_varlen.ops.attention import attention_columns, attention_inputs, varlen_attention
from ms_varlen.ops.body import use_body
from ms_varlen.planning.plan import PlanState
from ms_varlen.ranks.agreement import StepLengths, StepPlace, StepReports
from ms_varlen.ranks.drift import check_replicas
from ms_varlen.ranks.exchange import Exchange, connect
from ms_varlen.ranks.join import Ranks
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.workload import prepare
from tests.support.flash_attention import flash_attention_score, move_to_device

SECONDS = 10
RANK_FAULTS = {
    "a rank with other lengths": "RANK-DIFFERS",
    "a rank with its lengths in another order": "RANK-DIFFERS",
    "a rank at another step": "RANK-DIFFERS",
    "a rank with another recipe": "RANK-DIFFERS",
    "a rank with other weights": "RANK-DRIFT",
    "a rank that is gone": "RANK-LOST",
}
"""What can be wrong with the last of two ranks, and the code that every rank that is left must give."""

DEVICE_FAULT = "ends that were moved to the NPU"


def find_between_ranks(recipe: Path, fault: str | None) -> tuple[str, str | None, float]:
    """(who found it, the code, seconds) of what two ranks exchange in a step and a save; nobody where all is well.

    Args:
        recipe: whose first step the ranks are about to train.
        fault: one of `RANK_FAULTS`.
    """
    begin = time.perf_counter()
    loaded = load_recipe(recipe, [])
    workload = prepare(loaded, world_size=2)
    plan = workload.plans.epoch(0)
    batches = MicroBatches(workload.store.train, workload.layout, workload.store.pad_id, lambda lens: {})
    planned = StepLengths.of_plan(workload.plans.lengths, plan, 0, workload.layout)

    def work(exchange: Exchange) -> None:
        rank = exchange.ranks.rank
        planted = fault if rank == 1 else None
        if planted == "a rank that is gone":
            return
        exchange.agree({"recipe": {"train": {"seed": int(planted == "a rank with another recipe")}}})
        ids = plan.micro_batch(1 if planted == "a rank with other lengths" else 0, 0, rank)
        if planted == "a rank with its lengths in another order":
            ids = ids[::-1]
        step = int(planted == "a rank at another step")
        place = StepPlace(step, PlanState(0, 0), loaded.mode, workload.plans.fingerprint)
        found = StepLengths.of_micro_batches([batches.micro_batch(ids)])
        StepReports(exchange, 1, loaded.batch.max_segments).check(place, found, planned)
        weight = np.full((2, 3), 1.0 + 2**-23 * (planted == "a rank with other weights"), np.float32)  # the last bit
        check_replicas(exchange, [("weight", weight)], step=1)

    errors = on_two_ranks(work)
    left = errors[:1] if fault == "a rank that is gone" else errors
    codes = {error.code if isinstance(error, VarlenError) else None for error in left}
    code = codes.pop() if len(codes) == 1 else None
    return ("ranks" if code else "nobody"), code, time.perf_counter() - begin


def on_two_ranks(work: Callable[[Exchange], Any]) -> list[BaseException | None]:
    """What `work` raises on each of two connected ranks, threads of this process; None where nothing."""
    words: dict[int, np.ndarray] = {}
    told = threading.Barrier(2)
    errors: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        def gather(own: np.ndarray) -> np.ndarray:
            words[rank] = own
            told.wait(SECONDS)
            return np.stack([words[0], words[1]])

        exchange = connect(Ranks(rank, 2), gather, SECONDS)
        try:
            work(exchange)
        except VarlenError as error:
            errors[rank] = error
        finally:
            exchange.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def find_on_device(recipe: Path, moved: bool) -> tuple[str, str | None, float]:
    """(who found it, the code, seconds) where the attention of a recipe's first micro-batch meets the emulator.

    Args:
        recipe: whose lengths are taken; PyNative.
        moved: whether its ends are moved to the device before the call.
    """
    begin = time.perf_counter()
    workload = prepare(load_recipe(recipe, []))
    lens = workload.layout.place(workload.plans.lengths[workload.plans.epoch(0).micro_batch(0, 0)])
    (ends,) = attention_inputs(attention_columns(lens, "ascend"), "ascend")
    q, k, v = Tensor(np.random.default_rng(0).standard_normal((3, lens.tokens, 2, 16)), ms.float16)
    use_body("ascend")
    try:
        with mock.patch.object(ascend_attention.ops, "flash_attention_score", flash_attention_score):
            varlen_attention(q, k, v, (move_to_device(ends) if moved else ends,))
    except VarlenError as error:
        return "emulator", error.code, time.perf_counter() - begin
    finally:
        use_body(None)
    return "nobody", None, time.perf_counter() - begin
