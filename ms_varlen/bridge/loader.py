"""`VarlenDataLoader`, our corpus and plan as a data loader of MindFormers.

In a MindFormers YAML::

    train_dataset:
      data_loader:
        type: VarlenDataLoader
        data: {source: corpus.jsonl, tokenizer: tokenizer.json}
        seq_length: 4096
        create_compressed_eod_mask: True

It is a fixed number of rows that are looked up by number, so MindFormers' own skipping on resume (`set_init_step`)
lands at the right place of our plan. One worker thread prepares rows ahead.
"""

from typing import Any

import numpy as np
from mindspore.dataset import GeneratorDataset

from ms_varlen.bridge.feed import Feed, open_feed, remember
from ms_varlen.errors import DataError, VarlenError


class Rows:
    """Rows by number, each a tuple of the feed's columns."""

    def __init__(self, feed: Feed):
        self._feed = feed

    def __len__(self) -> int:
        return len(self._feed)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        row = self._feed.row(int(index))
        return tuple(row[name] for name in self._feed.columns)


class VarlenDataLoader:
    """Makes the data set; MindFormers batches it, adds row offsets, and trains on it.

    Args:
        column_names: `train_dataset.input_columns`.
        num_shards: data-parallel ranks; None where every rank loads all rows.
        shard_id: this rank's number among them.
        batch_size: rows of a step and rank.
        dataset_dir, python_multiprocessing, num_parallel_workers: given to every loader by MindFormers; not used here.
        keys: see `LoaderConfig`.
    Raises:
        DataError: what is wrong with the keys, the columns or the corpus.
    """

    def __new__(
        cls,
        column_names: list[str] | None = None,
        num_shards: int | None = None,
        shard_id: int | None = None,
        batch_size: int = 1,
        dataset_dir: str | None = None,
        python_multiprocessing: bool = False,
        num_parallel_workers: int = 1,
        **keys: Any,
    ):
        try:
            if dataset_dir is not None:
                keys["dataset_dir"] = dataset_dir
            feed = open_feed(keys, column_names, batch_size, shard_id or 0, num_shards or 1)
        except VarlenError as error:
            # MindFormers builds a new error from its text, which other classes do not take.
            raise DataError(str(error)) from error
        remember(feed)
        return GeneratorDataset(
            Rows(feed), list(feed.columns), shuffle=False, num_parallel_workers=1, python_multiprocessing=False
        )
