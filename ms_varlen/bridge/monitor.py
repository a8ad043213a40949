"""`VarlenMonitor`, a callback of MindFormers: checks the network, logs padding and balance, writes metrics.jsonl.

In a MindFormers YAML::

    callbacks:
      - type: VarlenMonitor

One rank writes, the first of the last pipeline stage, where the loss is valid: `metrics.jsonl` (a line for each step)
and `plan.json`, into `<output_dir>/ms_varlen`. `loss` is that rank's, the numbers of tokens are those of all ranks.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.core.context import is_legacy_model
from mindformers.tools import get_output_root_path
from mindformers.tools.logger import logger
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindformers.wrapper.wrapper import get_real_models
from mindspore import nn
from mindspore.train.callback import Callback, RunContext

from ms_varlen.bridge.checks import model_faults, refuse
from ms_varlen.bridge.config import LOADER_TYPE, LoaderConfig
from ms_varlen.bridge.feed import Feed, remembered_feed
from ms_varlen.bridge.saved import METRICS_FILE, PLAN_FILE, check_plan, set_aside
from ms_varlen.checkpoint.run_folder import cut_metrics
from ms_varlen.errors import DataError
from ms_varlen.files import write_atomically
from ms_varlen.train.loop import ids_hash

FROM_MODEL = (
    "seq_length",
    "use_flash_attention",
    "is_dynamic",
    "input_sliced_sig",
    "use_eod_reset",
    "use_eod_attn_mask_compression",
    "use_ring_attention",
    "ignore_token_id",
    "mtp_num_layers",
)


def network_faults(settings: LoaderConfig, columns: tuple[str, ...], train_network: nn.Cell) -> list[str]:
    """What is wrong with the network that MindFormers built; see `model_faults`."""
    model = get_real_models(train_network)
    legacy = is_legacy_model()
    config = model.config if legacy else model.get_gpt_transformer_config()
    values = {name: getattr(config, name) for name in FROM_MODEL if hasattr(config, name)}
    faults = model_faults(settings, {**values, "use_legacy": legacy})
    keys = _attribute(train_network, "construct_args_key")
    if keys is None or tuple(keys) != columns:
        faults.append(
            f"train_dataset.construct_args_key: must equal input_columns {list(columns)}, got {keys}; set it to that"
        )
    return faults


def planned_steps(params: Any) -> int:
    """Steps that MindSpore is about to train, by its callbacks' parameters.

    A CPU sinks no data, so there an epoch is the whole data set, whatever `batch_num` says.
    """
    sinks = ms.get_context("device_target") != "CPU"
    return params.epoch_num * (params.batch_num if sinks else params.train_dataset.get_dataset_size())


def _attribute(network: nn.Cell, name: str) -> Any:
    """An attribute of the outermost wrapper that has it, or None."""
    while True:
        if hasattr(network, name):
            return getattr(network, name)
        if not hasattr(network, "network"):
            return None
        network = network.network


class VarlenMonitor(Callback):
    """Logs what each step holds.

    Args:
        output_dir: folder of metrics.jsonl and plan.json; by default ms_varlen in MindFormers' `output_dir`.
    Raises:
        DataError: no `VarlenDataLoader` was built before.
    """

    def __init__(self, output_dir: str | None = None):
        super().__init__()
        feed = remembered_feed()
        if feed is None:
            raise DataError(
                f"train_dataset.data_loader.type must be {LOADER_TYPE} with this callback; set it, or remove it"
            )
        self._feed: Feed = feed
        self._folder = Path(output_dir or Path(get_output_root_path()) / "ms_varlen")
        self._first, self._done, self._offset, self._begin = 0, 0, 0, 0.0

    @property
    def _writes(self) -> bool:
        stages = ms.get_auto_parallel_context("pipeline_stages")
        return get_real_rank() == get_real_group_size() // stages * (stages - 1)

    def on_train_begin(self, run_context: RunContext) -> None:
        """Check the network and the number of steps, and open the files.

        Raises:
            RecipeError: a setting would train on wrong lengths or labels, or twice on the same samples.
            CheckpointError: training resumes from a step of another plan or of other data.
        """
        params, feed = run_context.original_args(), self._feed
        faults = network_faults(feed.config, feed.columns, params.train_network)
        planned = planned_steps(params)
        if planned > feed.steps:
            faults.append(
                f"runner_config.epochs: must give the {feed.steps} steps of the plan, got {planned}: a second pass "
                "would repeat samples; set it to 1, sink_mode to False on a CPU, and train_dataset.data_loader.steps "
                "to the steps of the whole run"
            )
        refuse(faults, "MindFormers configuration")
        self._first = self._done = params.train_dataset.get_init_step()
        self._offset = self._first - params.cur_step_num
        if self._first:
            plans, place = feed.workload.plans, feed.place(self._first)
            check_plan(self._folder, self._first, plans, place, feed.workload.store.fingerprint)
            logger.info(f"varlen: goes on after step {self._first}, place {place} of the plan")
        if self._writes:
            self._open_files()

    def _open_files(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        plans, metrics = self._feed.workload.plans, self._folder / METRICS_FILE
        if self._first:
            cut_metrics(metrics, self._first)
        else:
            for kept in set_aside(metrics, self._folder / PLAN_FILE):
                logger.info(f"varlen: begins anew; what an earlier run wrote is kept as {kept}")
        plan = {
            "plan_fingerprint": plans.fingerprint,
            "data_fingerprint": self._feed.workload.store.fingerprint,
            "settings": dataclasses.asdict(plans.settings),
            "steps": self._feed.steps,
            "loader": self._feed.config.model_dump(mode="json"),
        }
        write_atomically(self._folder / PLAN_FILE, [json.dumps(plan, indent=1).encode()])

    def on_train_step_begin(self, run_context: RunContext) -> None:
        """Take the time."""
        self._begin = time.perf_counter()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Log and write the steps since the last call: one, or as many as MindFormers sinks at a time."""
        params = run_context.original_args()
        now = self._offset + params.cur_step_num
        per_step_ms = (time.perf_counter() - self._begin) * 1e3 / max(now - self._done, 1)
        results = _results(params.net_outputs, params.train_network)
        for step in range(self._done + 1, now + 1):
            known = results if step == now else dict.fromkeys(results)
            self._one_step(step, {**known, "step_ms": round(per_step_ms, 3)})
        self._done = now

    def _one_step(self, step: int, results: dict[str, Any]) -> None:
        figures = self._feed.figures(step - 1)
        logger.info(
            f"varlen: step {step}, {figures['tokens_real']} real tokens in {figures['segments']} samples, pad_ratio "
            f"{figures['pad_ratio']:.4f}, imbalance {figures['imbalance']:.4f}"
        )
        place = self._feed.place(step)
        if self._writes:
            line = {
                "step": step,
                **results,
                **figures,
                "sample_ids_sha256": ids_hash(self._feed.sample_ids(step - 1)),
                "place": dataclasses.asdict(place),
            }
            with (self._folder / METRICS_FILE).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line, allow_nan=False) + "\n")
        if place.step == 0 or step == self._feed.steps:
            logger.info(f"varlen: ledger of epoch {figures['epoch']}: {json.dumps(self._feed.ledger(step))}")


def _results(outputs: Any, train_network: nn.Cell) -> dict[str, Any]:
    """Loss, learning rate and norm of MindFormers' step; null where not finite or not there."""
    loss, overflow, _, rate, norm = (*outputs, None, None)[:5]
    # Without a loss per token MindFormers adds the means of the micro-batches.
    parts = 1 if getattr(train_network, "calculate_per_token_loss", False) else _attribute(train_network, "micro_size")
    results = {"loss": _number(loss), "lr": _number(rate), "grad_norm": _number(norm)}
    if results["loss"] is not None:
        results["loss"] /= parts or 1
    if bool(_number(overflow)):
        results["skipped"] = True
    return results


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(np.mean(value.asnumpy() if isinstance(value, ms.Tensor) else value))
    return number if np.isfinite(number) else None
