"""One of our recipes as a complete YAML of MindFormers: `ms-varlen mindformers-recipe`.

Rows, labels and order of samples are those that `ms-varlen train` would use: the loader's keys come from the recipe.
The model is MindFormers': its core (mcore) Qwen3, or its legacy Llama. What a recipe of ours does not say, sizes of the
parallel dimensions above all, is written with one device's values, to be filled in.

MindFormers' learning rate begins at its step 0, ours at step 1: with a warm-up, its rates lag one step behind.
"""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from ms_varlen.bridge.checks import config_faults, refuse
from ms_varlen.bridge.config import LOADER_TYPE, MONITOR_TYPE, PACKED_COLUMNS, dynamic_length
from ms_varlen.bridge.model_sections import Family, model_section
from ms_varlen.bridge.run_checks import TASK_TYPE
from ms_varlen.data.tokens.tokenizers import open_tokenizer
from ms_varlen.errors import RecipeError
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.models.config import DecoderConfig
from ms_varlen.recipe.recipe import Recipe

FAMILIES: dict[str, Family] = {"qwen3": "qwen3", "llama": "llama"}

REMAINDER = 1
"""Of MindFormers' dynamic sizes, which are multiples of the divisor plus this; 0 would switch its padding off."""

PREFIX = "varlen"
"""Of the names of checkpoint files."""

SCHEDULES = {"cosine": "CosineWithWarmUpLR", "linear": "LinearWithWarmUpLR", "constant": "ConstantWarmUpLR"}

HEAD = """\
# A configuration of MindFormers 1.9 with the data side of ms_varlen, made by ms-varlen mindformers-recipe.
# MindFormers finds loader and callback through auto_register, with
#   export REGISTER_PATH=$(python -c "import ms_varlen.bridge as b; print(b.__path__[0])")
# and its own start script; or start it with: python -m ms_varlen.bridge.run THIS_FILE (checks everything first).
# To fill in: parallel_config (data_parallel * model_parallel * pipeline_stage devices), context, and
# load_path or load_checkpoint (ckpt-tools export-mindformers makes one from our weights and Hugging Face's).
"""


@dataclasses.dataclass(frozen=True)
class Devices:
    """How many devices share the work, and how.

    Attributes:
        data_parallel: copies of the model that train on different rows.
        model_parallel: devices that share each layer (tensor parallel).
        pipeline_stage: groups of layers, one after another.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1

    @property
    def total(self) -> int:
        """Devices in all."""
        return self.data_parallel * self.model_parallel * self.pipeline_stage


def mindformers_config(recipe: Recipe, family: Family, devices: Devices, auto_register: bool = True) -> dict[str, Any]:
    """The sections of a MindFormers YAML, ready to be dumped.

    Args:
        recipe: a packed, varlen or padded recipe.
        family: "qwen3" builds MindFormers' core Qwen3, "llama" its legacy Llama.
        devices: sizes of the parallel dimensions.
        auto_register: let MindFormers find loader and callback by REGISTER_PATH; False where code registers them.
    Raises:
        RecipeError: MindFormers' model or loader cannot do what the recipe asks for; one line for each fault.
    """
    tokenizer = open_tokenizer(recipe.data.tokenizer)
    model = recipe.model.config.with_vocab_size(tokenizer.vocab_size)
    refuse(_family_faults(recipe, model, family, devices), f"recipe for MindFormers' {family}")
    on_cpu, packed = recipe.device.target == "CPU", not recipe.mode.in_rows
    row_length = recipe.batch.token_budget if packed else recipe.model.seq_length
    assert row_length is not None, "the rules of a recipe see to it"
    config: dict[str, Any] = {
        **_run(recipe, family, devices),
        "train_dataset": _dataset(recipe, row_length, tokenizer.pad_id, auto_register),
        "context": _context(on_cpu),
        "parallel_config": _parallel_config(recipe, devices),
        "micro_batch_interleave_num": 1,
        "parallel": _parallel(devices, on_cpu),
        "recompute_config": {"recompute": recipe.model.recompute},
        "model": model_section(model, family, row_length, tokenizer.pad_id, packed, on_cpu),
        **_checkpoints(recipe, family),
        "callbacks": _callbacks(recipe, family, auto_register),
        "runner_wrapper": _wrapper(recipe),
    }
    config["train_dataset_task"] = {"type": TASK_TYPE, "dataset_config": config["train_dataset"]}
    if not packed and recipe.batch.pad_to == "batch":
        longest = dynamic_length(row_length, recipe.shapes.divisor, REMAINDER)
        position_key = "max_position_embedding" if family == "llama" else "max_position_embeddings"
        config["model"]["model_config"] |= {"is_dynamic": True, "seq_length": longest, position_key: longest}
    refuse(config_faults(config), "recipe for MindFormers")
    return config


def _run(recipe: Recipe, family: Family, devices: Devices) -> dict[str, Any]:
    """What is run, in how many micro-batches a step, and the optimizer.

    Outside of semi-automatic parallel MindFormers resets its gradient accumulation to 1: one batch holds the step.
    """
    on_cpu, train = recipe.device.target == "CPU", recipe.train
    micro_batches, rows, split = recipe.batch.micro_batches, recipe.batch.rows or 1, devices.total > 1 and not on_cpu
    return {
        "seed": train.seed,
        "output_dir": str(recipe.checkpoint.output_dir),
        "run_mode": "train",
        "print_separate_loss": False,  # there is one loss
        "load_ckpt_format": "safetensors",
        "use_legacy": family == "llama",
        "use_parallel": devices.total > 1,
        # The loss of a step is then the mean over all of its tokens, not over the means of its micro-batches.
        "calculate_per_token_loss": split and micro_batches > 1,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": f"varlen_{family}"},
        "runner_config": {
            "epochs": 1,
            "batch_size": rows if split else rows * micro_batches,
            "gradient_accumulation_steps": micro_batches if split and devices.pipeline_stage == 1 else 1,
            "sink_mode": not on_cpu,
            "sink_size": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "betas": [train.beta1, train.beta2],
            "eps": train.eps,
            "weight_decay": train.weight_decay,
        },
        "lr_schedule": _schedule(recipe),
    }


def _parallel_config(recipe: Recipe, devices: Devices) -> dict[str, Any]:
    return {
        "data_parallel": devices.data_parallel,
        "model_parallel": devices.model_parallel,
        "pipeline_stage": devices.pipeline_stage,
        "micro_batch_num": recipe.batch.micro_batches if devices.pipeline_stage > 1 else 1,
        "use_seq_parallel": devices.model_parallel > 1,
        "vocab_emb_dp": False,
        "gradient_aggregation_group": 1,
    }


def _wrapper(recipe: Recipe) -> dict[str, Any]:
    norm = recipe.train.clip_grad_norm
    wrapper = {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": norm is not None}
    return wrapper if norm is None else wrapper | {"max_grad_norm": norm}


def mindformers_yaml(config: dict[str, Any]) -> str:
    """The text of a YAML file, from what `mindformers_config` gave."""
    return HEAD + yaml.safe_dump(config, sort_keys=False, width=120)


def _family_faults(recipe: Recipe, model: DecoderConfig, family: Family, devices: Devices) -> list[str]:
    faults = []
    if recipe.mode.splits_rows:
        faults.append(
            "mode: must be packed, varlen or padded, got bucketed: MindFormers has one graph; use mode=packed"
        )
    if model.qk_norm != (family == "qwen3"):
        wanted = "qwen3" if family == "qwen3" else "llama or qwen2"
        faults.append(
            f"model.config.architecture: must be {wanted} for MindFormers' {family}, got {model.architecture}; set it, "
            f"or --family {'llama' if family == 'qwen3' else 'qwen3'}"
        )
    if recipe.model.init_from is not None:
        faults.append(
            f"model.init_from: must be null, got {recipe.model.init_from}: MindFormers loads its own checkpoints; set "
            "model.init_from=null, make one with ckpt-tools export-mindformers, and name it in the YAML"
        )
    if model.rope_scaling is not None and family == "qwen3":
        faults.append(
            f"model.config.rope_scaling: must be null for MindFormers' qwen3, got {model.rope_scaling.rope_type}: it "
            "would not be computed; remove it, or train here"
        )
    if model.mlp_bias or model.attention_output_bias:
        faults.append("model.config: must have no bias in o_proj and MLP, which MindFormers' model lacks; remove it")
    if family == "llama" and model.head_dim * model.num_attention_heads != model.hidden_size:
        faults.append(
            f"model.config.head_dim: must be hidden_size / num_attention_heads for the legacy Llama, got "
            f"{model.head_dim}; set it"
        )
    if recipe.device.target == "CPU" and family == "llama" and not recipe.mode.in_rows:
        faults.append("mode: must be padded for the legacy Llama on a CPU, got " + recipe.mode + "; use --family qwen3")
    if devices.pipeline_stage > recipe.batch.micro_batches:
        faults.append(
            f"batch.micro_batches: must be >= the pipeline stages ({devices.pipeline_stage}), got "
            f"{recipe.batch.micro_batches}; raise it"
        )
    if model.num_key_value_heads % devices.model_parallel:
        faults.append(
            f"model_parallel: must divide num_key_value_heads ({model.num_key_value_heads}), got "
            f"{devices.model_parallel}; lower it"
        )
    return faults


def _schedule(recipe: Recipe) -> dict[str, Any]:
    train = recipe.train
    schedule: dict[str, Any] = {
        "type": SCHEDULES[train.schedule],
        "learning_rate": train.learning_rate,
        "warmup_steps": train.warmup_steps,
        "total_steps": train.steps,
    }
    if train.schedule != "constant":
        schedule["lr_end"] = train.learning_rate * train.min_lr_ratio
    return schedule


def _dataset(recipe: Recipe, row_length: int, pad_id: int, auto_register: bool) -> dict[str, Any]:
    packed = not recipe.mode.in_rows
    data = {k: v for k, v in recipe.data.model_dump(mode="json", exclude_defaults=True).items() if k != "eval_fraction"}
    loader: dict[str, Any] = {
        "type": LOADER_TYPE,
        **({"auto_register": f"register.{LOADER_TYPE}"} if auto_register else {}),
        "mode": recipe.mode.value,
        "data": {**data, "eval_fraction": recipe.data.eval_fraction},
        "seq_length": row_length,
        "steps": recipe.train.steps,
        "seed": recipe.train.seed,
        "model": recipe.model.config.model_dump(mode="json", exclude_unset=True),
    }
    dataset: dict[str, Any] = {"data_loader": loader}
    if packed:
        loader["longest_sample"] = recipe.model.seq_length
        loader["create_compressed_eod_mask"] = True
        loader["compressed_eod_mask_length"] = recipe.batch.max_segments
    else:
        columns = list(PACKED_COLUMNS[:3])
        dataset |= {"input_columns": columns, "construct_args_key": columns[:]}
        loader["pad_to"] = recipe.batch.pad_to
        if recipe.batch.window is not None:
            loader["window"] = recipe.batch.window
        if recipe.batch.pad_to == "batch":
            sizes = {"divisor": recipe.shapes.divisor, "remainder": REMAINDER}
            dataset |= {"dynamic_batch": True, **sizes}
            loader |= sizes
            dataset["pad_token_id"] = [pad_id, IGNORE_INDEX, 0]
    return dataset | {
        "num_parallel_workers": 1,
        "python_multiprocessing": False,
        "drop_remainder": True,
        "numa_enable": False,
        "prefetch_size": 1,
    }


def _context(on_cpu: bool) -> dict[str, Any]:
    if on_cpu:
        return {"mode": 0, "device_target": "CPU"}
    return {
        "mode": 0,
        "device_target": "Ascend",
        "max_device_memory": "58GB",
        "jit_config": {"jit_level": "O0"},
        "ascend_config": {"precision_mode": "must_keep_origin_dtype"},
    }


def _parallel(devices: Devices, on_cpu: bool) -> dict[str, Any]:
    """Semi-automatic parallel on NPUs; without a dataset_strategy MindFormers makes one from the columns."""
    if on_cpu or devices.total == 1:
        return {"parallel_mode": 0, "full_batch": False}
    return {
        "parallel_mode": 1,
        "full_batch": False,
        "enable_alltoall": False,
        "search_mode": "sharding_propagation",
        "enable_parallel_optimizer": devices.data_parallel > 1,
        "strategy_ckpt_config": {"save_file": "./ckpt_strategy.ckpt", "only_trainable_params": False},
    }


def _checkpoints(recipe: Recipe, family: Family) -> dict[str, Any]:
    """Loading and saving: in MindFormers' new format for its core models, in the legacy one for legacy models."""
    if family == "llama":
        return {
            "load_checkpoint": "",
            "auto_trans_ckpt": False,
            "resume_training": False,
        }
    return {
        "checkpoint": {
            "load_path": "",
            "no_load_optim": True,  # False resumes from a checkpoint of MindFormers, at its place in the plan
            "save_path": str(recipe.checkpoint.output_dir / "checkpoint"),
            "save_max": recipe.checkpoint.keep,
            "save_interleaved_steps": recipe.checkpoint.every or recipe.train.steps,
            "prefix": PREFIX,
            "async_save": False,
        }
    }


def _callbacks(recipe: Recipe, family: Family, auto_register: bool) -> list[dict[str, Any]]:
    monitor = {"type": MONITOR_TYPE, **({"auto_register": f"register.{MONITOR_TYPE}"} if auto_register else {})}
    checkpoint: dict[str, Any] = {"type": "CheckpointMonitor", "checkpoint_format": "safetensors"}
    if family == "llama":
        checkpoint |= {
            "prefix": PREFIX,
            "save_checkpoint_steps": recipe.checkpoint.every or recipe.train.steps,
            "keep_checkpoint_max": recipe.checkpoint.keep,
            "integrated_save": False,
            "async_save": False,
        }
    return [{"type": "MFLossMonitor"}, monitor, checkpoint]


def write_mindformers_recipe(
    recipe: Recipe, family: str, devices: Devices, output: Path | None, force: bool = False
) -> str:
    """Make the YAML, and write it where `output` names a file; the text.

    Raises:
        RecipeError: no such family, what `mindformers_config` refuses, the file exists and `force` is not given, or it
            cannot be written.
    """
    if family not in FAMILIES:
        raise RecipeError([f"--family: must be one of {', '.join(FAMILIES)}, got {family}; choose one"], "command line")
    if output is not None and output.exists() and not force:
        raise RecipeError(
            [f"--output: must be a new file, {output} exists already; name another, or overwrite it with --force"],
            "command line",
        )
    text = mindformers_yaml(mindformers_config(recipe, FAMILIES[family], devices))
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RecipeError(
                [f"--output: must be a file that can be written, got {error}; name another"], "command line"
            ) from error
    return text
