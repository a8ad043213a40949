"""Settings of MindFormers around the model: steps, data set, parallel dimensions. No MindSpore, no MindFormers."""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_varlen.bridge.config import LOADER, LoaderConfig
from ms_varlen.bridge.yaml_types import section
from ms_varlen.limits import MAX_SEGMENTS

SEMI_AUTO = (1, 2, "semi_auto_parallel", "auto_parallel")
"""Values of `parallel.parallel_mode` under which MindFormers accumulates gradients."""

TASK_TYPE = "CausalLanguageModelDataset"
"""MindFormers' data set that adds row offsets to our ends and pads dynamic batches."""


def run_faults(settings: LoaderConfig, config: Mapping[str, Any]) -> list[str]:
    """Faults of the number of steps and of the data set's class.

    `train_dataset_task.dataset_config` may hold anything: MindFormers puts `train_dataset` in its place
    (`check_dataset_config`), and needs the section to be there.
    """
    faults = []
    epochs = section(config, "runner_config").get("epochs", 1)
    if epochs != 1:
        faults.append(
            f"runner_config.epochs: must be 1, got {epochs}: a second pass would repeat the samples of the first, and "
            "0 trains nothing; set it to 1 and train_dataset.data_loader.steps to the steps of the whole run"
        )
    repeat = section(config, "train_dataset").get("repeat")
    if repeat is not None and repeat > 1:
        faults.append(
            f"train_dataset.repeat: must be 1, got {repeat}: it would repeat all samples in one order; remove it and "
            "set train_dataset.data_loader.steps to the steps of the whole run"
        )
    for key in ("data_skip_steps", "ignore_data_skip"):
        if config.get(key):
            faults.append(
                f"{key}: must be left out, got {config[key]}: a resumed run would train other samples than those at "
                "its step of the plan; remove it"
            )
    runner = section(config, "runner_config")
    sinks = runner.get("sink_mode", True)  # as MindFormers has it
    if sinks and section(config, "context").get("device_target") == "CPU":
        faults.append(
            "runner_config.sink_mode: must be False on a CPU, got True: each sink would be a pass over all samples; "
            "set it to False"
        )
    sink_size = runner.get("sink_size") or -1
    if sinks and sink_size > 0 and settings.steps is not None and settings.steps % sink_size:
        faults.append(
            f"runner_config.sink_size: must divide {LOADER}.steps ({settings.steps}), got {sink_size}: the last "
            f"{settings.steps % sink_size} steps would be left out; set it to 1"
        )
    schedule = section(config, "lr_schedule")
    total = schedule.get("total_steps")
    # -1 and null are MindFormers' own count of steps; a constant rate does not depend on it.
    planned = total in (None, -1, settings.steps) or schedule.get("type") == "ConstantWarmUpLR"
    if settings.steps is not None and not planned:
        faults.append(
            f"lr_schedule.total_steps: must equal {LOADER}.steps ({settings.steps}), got {total}: the rate would end "
            f"at another step than the run; set it to {settings.steps}, or remove it"
        )
    task = section(config, "train_dataset_task").get("type")
    if task != TASK_TYPE:
        faults.append(
            f"train_dataset_task.type: must be {TASK_TYPE}, which adds row offsets to actual_seq_len, got {task}; set "
            f"train_dataset_task: {{type: {TASK_TYPE}}}"
        )
    return faults


def parallel_faults(settings: LoaderConfig, config: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """Faults of the parallel sections, and of the number of rows."""
    faults = []
    parallel = section(config, "parallel")
    runner, ranks = section(config, "runner_config"), section(config, "parallel_config")
    data_parallel, strategy = ranks.get("data_parallel") or 1, parallel.get("dataset_strategy")
    semi_auto = config.get("use_parallel", False) and parallel.get("parallel_mode", 1) in SEMI_AUTO
    accumulated = runner.get("gradient_accumulation_steps") or 1
    if accumulated > 1 and not semi_auto:
        faults.append(
            f"runner_config.gradient_accumulation_steps: must be 1 outside of semi-automatic parallel, got "
            f"{accumulated}: MindFormers resets it; set it to 1 and multiply runner_config.batch_size by {accumulated}"
        )
    if strategy not in (None, "full_batch", [[data_parallel, 1]] * len(columns)):
        faults.append(
            f"parallel.dataset_strategy: must be [{data_parallel}, 1] for each of {len(columns)} columns, got "
            f"{strategy}; remove it or set that"
        )
    if not settings.packed:
        return faults
    if strategy == "full_batch" and data_parallel > 1:
        faults.append(
            "parallel.dataset_strategy: must not be full_batch with data_parallel > 1: row offsets would run over all "
            "ranks; remove it, each rank then loads its own rows"
        )
    elif parallel.get("full_batch", semi_auto) and data_parallel > 1:
        # Left out it is True. MindFormers multiplies the batch by data_parallel for it, and then turns it off again for
        # our columns.
        faults.append(
            f"parallel.full_batch: must be False in mode {settings.mode} with data_parallel > 1, got True: each rank "
            f"would load {data_parallel} times its rows; set it to False"
        )
    for key in ("context_parallel", "seq_split_num"):
        if (ranks.get(key) or 1) > 1:
            # Ends are counted in whole rows, and nothing here splits them, or proves how MindSpore does.
            faults.append(
                f"parallel_config.{key}: must be 1 in mode {settings.mode}, got {ranks[key]}: the ends of samples are "
                "those of whole rows, a part of a row has others; set it to 1"
            )
    interleave = config.get("micro_batch_interleave_num") or 1
    if interleave > 1:
        faults.append(
            f"micro_batch_interleave_num: must be 1 in mode {settings.mode}, got {interleave}: row offsets would not "
            "restart in the second half; set it to 1"
        )
    entries = (runner.get("batch_size") or 1) * settings.compressed_eod_mask_length
    if entries > MAX_SEGMENTS:
        faults.append(
            f"runner_config.batch_size: batch_size * compressed_eod_mask_length must be <= {MAX_SEGMENTS} "
            f"(FlashAttentionScore), got {entries}; set batch_size: 1 and a larger seq_length"
        )
    return faults
