"""MindFormers' core Qwen3 with our loader, as a program: ``python bridge_core_run.py FOLDER``.

FOLDER holds `train.yaml`, `resume.yaml`, which resumes from its middle, and `eight_billion.yaml`. Prints one JSON
object as its last line.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from ms_varlen.bridge.config import PACKED_COLUMNS
from ms_varlen.bridge.feed import open_feed
from ms_varlen.bridge.run import train


def trained(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl after a run of MindFormers' Trainer."""
    train(folder / name)
    metrics = folder / "output" / "ms_varlen" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def changed_by_an_edit(folder: Path) -> dict[str, Any]:
    """The tokens whose logits differ when one token of the second sample of the first of two rows is another.

    Also the `faults` of that network, which nothing wraps, for rows of another length.
    """
    from mindformers.models import build_network
    from mindformers.tools.register import MindFormerConfig
    from mindspore import Tensor

    net = build_network(MindFormerConfig(str(folder / "train.yaml")).model)
    net.set_train(False)
    keys = yaml.safe_load((folder / "train.yaml").read_text())["train_dataset"]["data_loader"]
    feed = open_feed({k: v for k, v in keys.items() if k not in ("type", "auto_register")}, PACKED_COLUMNS, 2)
    rows = [feed.row(0), feed.row(1)]
    batch = {name: np.stack([row[name] for row in rows]) for name in PACKED_COLUMNS}
    batch["actual_seq_len"] += np.array([[0], [batch["input_ids"].shape[1]]], np.int32)  # as asl_batch_wrapper does
    first, end = (int(end) for end in batch["actual_seq_len"][0, 1:3])
    edited = batch["input_ids"].copy()
    edited[0, first + 1] = (edited[0, first + 1] + 1) % 256

    def logits(ids: np.ndarray) -> np.ndarray:
        given = {name: Tensor(batch[name]) for name in ("position_ids", "loss_mask", "actual_seq_len")}
        return net(Tensor(ids), **given).asnumpy()

    before, after = logits(batch["input_ids"]), logits(edited)
    changed = np.flatnonzero((before != after).any(axis=1))
    from ms_varlen.bridge.monitor import network_faults

    longer = feed.config.model_copy(update={"seq_length": 4096})
    return {
        "faults": [fault.split(":")[0] for fault in network_faults(longer, feed.columns, net)],
        "tokens": before.shape[0],
        "edited": first + 1,
        "end": end,
        "first_changed": int(changed[0]),
        "last_changed": int(changed[-1]),
    }


def planned_with_a_sink() -> int:
    """Steps that the monitor expects of 20 sinks of one step, on a CPU and a data set of 20."""
    from mindspore.dataset import NumpySlicesDataset

    from ms_varlen.bridge.monitor import planned_steps

    rows = NumpySlicesDataset(np.zeros((20, 1), np.int32), shuffle=False)
    return planned_steps(SimpleNamespace(epoch_num=20, batch_num=1, train_dataset=rows))


def core_configuration(path: Path) -> dict[str, Any]:
    """What MindFormers' own configuration classes make of a YAML for many devices."""
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.build_model import get_model_config
    from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config
    from mindformers.tools.register import MindFormerConfig

    config = MindFormerConfig(str(path))
    build_parallel_config(config)
    model = get_model_config(config.model, default_args={"parallel_config": config.parallel_config})
    core = convert_to_transformer_config(model)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "input_layout", "sparse_mode", "num_layers")
    return {"model": type(model).__name__, **{name: getattr(core, name) for name in names}}


def main(folder: Path) -> None:
    """Do everything, in an order that shares the import and the context."""
    result = {
        "whole": trained(folder, "train.yaml"),
        "resumed": trained(folder, "resume.yaml"),
        "planned_with_a_sink": planned_with_a_sink(),
        "edit": changed_by_an_edit(folder),
        "eight_billion": core_configuration(folder / "eight_billion.yaml"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
