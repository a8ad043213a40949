import json
from pathlib import Path

import numpy as np

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.layout import Layout
from ms_varlen.data.config import DataConfig
from ms_varlen.data.store.store import prepare_store
from ms_varlen.limits import IGNORE_INDEX


class Exact:
    def size_for(self, tokens):
        return tokens


def test_micro_batches_learn_what_the_records_say(tmp_path):
    records = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3]},
        {"input_ids": [10, 11, 12, 13], "labels": [-100, -100, -100, 13]},
    ]
    source = Path(tmp_path, "corpus.jsonl")
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(source=str(source), tokenizer="bytes", store_dir=str(tmp_path / "stores"), eval_fraction=0)
    table = prepare_store(config, 8).train
    alone = {0: [(6, 7)], 1: [(8, 9)], 2: [(1, 2), (2, 3)], 3: [(12, 13)]}
    for layout in (Layout("varlen", Exact(), 8), Layout("padded", Exact(), 8, rows=4, row_lengths=(4, 8))):
        batches = MicroBatches(table, layout, 0, lambda lens: {})
        for ids in ([0, 1], [3, 2, 0], [1]):
            columns = batches.micro_batch(np.array(ids))
            places = np.flatnonzero(columns["labels"] != IGNORE_INDEX)
            pairs = list(zip(columns["input_ids"][places].tolist(), columns["labels"][places].tolist(), strict=True))
            assert pairs == [pair for i in ids for pair in alone[i]]
