"""Data sets as people bring them, each with one fault: one error that names file, record and field, and no store."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ms_varlen.data.config import DataConfig
from ms_varlen.data.sources import record_batches as batches
from ms_varlen.data.store.store import prepare_store
from ms_varlen.errors import DataError, RecipeError
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.workload.workload import prepare
from tests.support.tiny_recipe import tiny_recipe

GOOD = [{"text": f"text {n}"} for n in range(8)]


def written(path: Path, content) -> Path:
    """A file of bytes, of text, of the lines of objects, or of the columns of a table."""
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif isinstance(content, list):
        path.write_text("".join(json.dumps(record) + "\n" for record in content))
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    return path


def config(source: Path, **settings) -> DataConfig:
    return DataConfig(
        source=str(source), tokenizer="bytes", store_dir=str(source.parent / "stores"), eval_fraction=0.0, **settings
    )


WRONG = {
    "no such field": (
        "a.jsonl",
        [{"content": "a", "id": 1}],
        r"a record must have field 'text'.*, got fields content, id, in .*a.jsonl line 1; rename",
    ),
    "ShareGPT": (
        "a.jsonl",
        [{"conversations": [{"from": "human", "value": "a"}]}],
        r"got fields conversations, in .*a.jsonl line 1; write each turn \{from, value\} as \{role, content\}",
    ),
    "Alpaca": (
        "a.jsonl",
        [{"instruction": "a", "input": "", "output": "b"}],
        r"got fields instruction, input, output, in .*a.jsonl line 1; write 'prompt' .* and 'completion'",
    ),
    "no such field later": (
        "a.jsonl",
        [*GOOD, {"content": "a"}],
        r"field 'text' must be there in every record of kind text, got fields content, in .*a.jsonl line 9",
    ),
    "mixed kinds": (
        "a.jsonl",
        [{"prompt": "a", "completion": "b"}, {"text": "a"}],
        r"field 'prompt' must be there in every record of kind completion, got fields text, in .*a.jsonl line 2",
    ),
    "an empty file": ("a.jsonl", "", r"data.source must hold a record, got none, in .*a.jsonl; fill it"),
    "blank lines only": ("a.jsonl", "\n \n", r"data.source must hold a record, got none, in .*a.jsonl; fill it"),
    "invalid JSON in line 3": (
        "a.jsonl",
        '{"text": "a"}\n{"text": "b"}\n{"text": "c"\n',
        r"a line must be a JSON object, got Expecting ',' delimiter at character 12, in .*a.jsonl line 3; fix",
    ),
    "one JSON array": (
        "a.json",
        json.dumps(GOOD, indent=1),
        r"a line must be a JSON object, got Expecting value.*, in .*a.json line 1; write one object a line",
    ),
    "an array of numbers": (
        "a.json",
        "[1, 2]\n",
        r"a line must be a JSON object, got an array, in .*a.json line 1; fix or remove the line",
    ),
    "an array that is cut off": (
        "a.json",
        "[1, 2\n",
        r"a line must be a JSON object, got Expecting .*, in .*a.json line 1; fix or remove the line",
    ),
    "an array of objects in one line": (
        "a.json",
        json.dumps(GOOD),
        r"a line must be a JSON object, got an array, in .*a.json line 1; write one object a line \(jq -c '.\[\]' does",
    ),
    "a pretty-printed object": (
        "a.json",
        json.dumps(GOOD[0], indent=1),
        r"a line must be a JSON object, got .*, in .*a.json line 1; write one object a line \(jq -c \. does\)",
    ),
    "a number of many digits": (
        "a.jsonl",
        '{"text": "a", "id": ' + "1" * 5000 + "}\n",
        r"a line must be a JSON object, got an integer of more digits than can be read, in .*a.jsonl line 1; fix",
    ),
    "deep nesting": (
        "a.jsonl",
        '{"text": "a", "id": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        r"a line must be a JSON object, got arrays or objects nested too deeply, in .*a.jsonl line 1; fix",
    ),
    "a mask in some records": (
        "a.jsonl",
        [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [1, 2]}],
        r"field 'loss_mask' must be there in every record of a source whose first has it, got none, .*a.jsonl line 2",
    ),
    "Parquet with a mask in some rows": (
        "a.parquet",
        {"input_ids": [[1, 2], [1, 2]], "completion_mask": [None, [0, 1]]},
        r"field 'completion_mask' must be left out in a source whose first record has none.*, in .*a.parquet row 1;",
    ),
    "Parquet with a mask of another name": (
        "a.parquet",
        {"input_ids": [[1, 2]], "loss_masks": [[0, 1]]},
        r"a mask or labels next to input_ids must be called .*, got field 'loss_masks', in .*a.parquet row 0; rename",
    ),
    "Parquet with unsigned ids": (
        "a.parquet",
        {"input_ids": pa.array([[1, 2**63 + 5]], pa.list_(pa.uint64()))},
        r"input_ids\[1\] must be at most 9223372036854775807, got 9223372036854775813, in .*a.parquet row 0",
    ),
    "Parquet without the column": (
        "a.parquet",
        {"content": ["a", "b"], "id": [1, 2]},
        r"a record must have field 'text'.*, got fields content, id, in .*a.parquet row 0; rename",
    ),
    "Parquet with a null": (
        "a.parquet",
        {"text": ["a", None]},
        r"field 'text' must be there, got null, in .*a.parquet row 1; fix",
    ),
    "wrong encoding": (
        "a.jsonl",
        '{"text": "abc"}\n{"text": "Grüße"}\n'.encode("latin-1"),
        r"a line must be UTF-8, got byte 0xfc at byte 12, in .*a.jsonl line 2; save the file as UTF-8",
    ),
    "UTF-16": (
        "a.jsonl",
        '{"text": "abc"}\n'.encode("utf-16"),
        r"a line must be UTF-8, got byte 0xff at byte 0, in .*1;",
    ),
    "labels of another length": (
        "a.jsonl",
        [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [1, 2]}],
        r"field 'labels' must be as long as input_ids \(3\), got 2, in .*a.jsonl line 2; fix",
    ),
    "ids of another tokenizer": (
        "a.jsonl",
        [{"input_ids": [1, 2, 50000]}],
        r"input_ids\[2\] must be from 0 to 257, .*, got 50000, in .*a.jsonl line 1; name the tokenizer",
    ),
    "only prompts": (
        "a.jsonl",
        [{"prompt": "a", "id": 1}],
        r"field 'completion' must be next to 'prompt', got fields prompt, id, in .*a.jsonl line 1; add",
    ),
    "one giant record": (
        "a.jsonl",
        [*GOOD, {"text": "a" * 3000}],
        r"a record must be <= 1000 bytes, got \d+ or more, in .*a.jsonl line 9; write one document a record",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_data_set_is_named_and_leaves_nothing(tmp_path, monkeypatch, name):
    if name == "one giant record":
        monkeypatch.setattr(batches, "MAX_RECORD_BYTES", 1000)
        monkeypatch.setattr("ms_varlen.data.sources.text_files.BATCH_BYTES", 500)
    file, content, message = WRONG[name]
    path = written(tmp_path / file, content)
    with pytest.raises(DataError, match=message) as raised:
        prepare_store(config(path), 64)
    assert "\n" not in str(raised.value)
    left = [entry.suffix for entry in (tmp_path / "stores").glob("*")]
    assert set(left) <= {".lock", ".json"}, "no store, and none that is half written"
    good = written(path, {"text": [record["text"] for record in GOOD]} if file.endswith(".parquet") else GOOD)
    store = prepare_store(config(good), 64)
    store.verify()
    assert np.array_equal(store.train.lengths, [7] * 8)


def test_a_tokenizer_larger_than_the_models_vocabulary_is_named(tmp_path):
    written(tmp_path / "corpus.jsonl", GOOD)
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257}
    recipe = parse_recipe(tiny_recipe(tmp_path, model={"config": config}))
    with pytest.raises(RecipeError, match=r"model.config.vocab_size must be >= the tokenizer's size \(258\), got 257"):
        prepare(recipe)
