"""A rank of MindFormers' Trainer with our loader: ``msrun ... bridge_ranks_run.py FOLDER``.

Trains FOLDER/train.yaml and writes the batches of its steps to `fed_<rank>.npz`.
"""

import os
import sys
from pathlib import Path

import numpy as np

from ms_varlen.bridge.run import train


def main(folder: Path) -> None:
    """Train, with a callback of MindFormers that keeps the batches."""
    import mindspore as ms

    ms.set_device("CPU")
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
    from mindspore.train.callback import Callback, RunContext

    fed: dict[str, np.ndarray] = {}

    class KeepBatches(Callback):
        def on_train_step_end(self, run_context: RunContext) -> None:
            params = run_context.original_args()
            ids, _, mask = (column.asnumpy() for column in params.train_dataset_element)
            fed[f"ids_{params.cur_step_num}"], fed[f"mask_{params.cur_step_num}"] = ids, mask

    MindFormerRegister.register_cls(KeepBatches, MindFormerModuleType.CALLBACK)
    train(folder / "train.yaml")
    np.savez(folder / f"fed_{os.environ['RANK_ID']}.npz", **fed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
