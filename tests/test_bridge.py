import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from ms_varlen.bridge.checks import config_faults, dynamic_length
from ms_varlen.bridge.config import PACKED_COLUMNS, check_columns, read_loader_config
from ms_varlen.bridge.feed import Feed, open_feed, packed_row, padded_row, remembered_feed
from ms_varlen.bridge.loader import VarlenDataLoader
from ms_varlen.bridge.recipes import Devices, mindformers_config, mindformers_yaml, write_mindformers_recipe
from ms_varlen.bridge.run import check_file, main
from ms_varlen.bridge.saved import check_plan, saved_plan_state
from ms_varlen.data.layouts import lay_out
from ms_varlen.errors import CheckpointError, DataError, LengthsError, RecipeError
from ms_varlen.lengths import SeqLens
from ms_varlen.train.recipe import load_recipe
from ms_varlen.train.workload import prepare

ROOT = Path(__file__).parent.parent
READY = {
    "qwen3_cpu.yaml": (
        "qwen3",
        Devices(),
        "model.config.hidden_size=64 model.config.num_hidden_layers=2 batch.token_budget=2048 batch.max_segments=128 "
        "train.steps=20 device.target=CPU checkpoint.output_dir=output/qwen3_cpu model.config.architecture=qwen3",
    ),
    "qwen3_1p.yaml": (
        "qwen3",
        Devices(),
        "model.config.architecture=qwen3 device.target=Ascend checkpoint.output_dir=output/qwen3",
    ),
    "llama_1p.yaml": ("llama", Devices(), "device.target=Ascend checkpoint.output_dir=output/llama"),
    "qwen3_8b_8p.yaml": (
        "qwen3",
        Devices(model_parallel=4, pipeline_stage=2),
        "batch.token_budget=8192 batch.max_segments=128 batch.micro_batches=8 model.seq_length=4096 "
        "model.max_position_embeddings=4096 model.config.architecture=qwen3 model.config.hidden_size=4096 "
        "model.config.num_hidden_layers=36 model.config.num_attention_heads=32 model.config.num_key_value_heads=8 "
        "model.config.head_dim=128 model.config.intermediate_size=12288 model.config.vocab_size=151936 "
        "model.config.rope_theta=1e6 model.recompute=true device.target=Ascend checkpoint.output_dir=output/qwen3_8b",
    ),
}
"""Each file of recipes/mindformers, and how `ms-varlen mindformers-recipe recipes/packed.yaml` made it."""

NO_EVALUATION = ["train.eval_every=null", "data.eval_fraction=0"]


def ready_config(name: str) -> dict:
    family, devices, overrides = READY[name]
    return mindformers_config(
        load_recipe(ROOT / "recipes" / "packed.yaml", overrides.split() + NO_EVALUATION), family, devices
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict:
    """The `data` section of 96 short texts."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    texts = ["".join(map(chr, random.integers(97, 123, int(n)))) for n in random.integers(20, 300, 96)]
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(source), "tokenizer": "bytes", "store_dir": str(folder)}


def packed_keys(corpus: dict, **keys) -> dict:
    return {"data": corpus, "seq_length": 2048, "create_compressed_eod_mask": True, **keys}


def padded_keys(corpus: dict, **keys) -> dict:
    return {"data": corpus, "seq_length": 512, "mode": "padded", **keys}


def columns_of(lens: SeqLens, tokens: list[int]) -> dict:
    return lay_out(lens, np.array(tokens), 0)


def assert_columns(row: dict, expected: dict) -> None:
    assert {name: values.tolist() for name, values in row.items()} == expected
    assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}


def test_a_packed_row_has_running_ends_filled_with_its_length():
    row = packed_row(columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9]), 4)
    assert_columns(
        row,
        {
            "input_ids": [5, 6, 7, 8, 9, 0, 0, 0],
            "labels": [6, 7, -100, 9, -100, -100, -100, -100],
            "loss_mask": [1, 1, 0, 1, 0, 0, 0, 0],
            "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
            "actual_seq_len": [3, 5, 8, 8],
        },
    )


def test_a_row_with_as_many_segments_as_entries_ends_at_its_length():
    row = packed_row(columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9]), 3)
    assert row["actual_seq_len"].tolist() == [3, 5, 8]


def test_more_segments_than_entries_are_refused_with_the_key_to_set():
    columns = columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9])
    with pytest.raises(
        LengthsError, match=r"at most 2 entries .* got 3 segments; set .*compressed_eod_mask_length to 3"
    ):
        packed_row(columns, 2)


def test_padded_rows_are_whole_or_cut_to_their_samples():
    columns = columns_of(SeqLens.in_rows([3, 2], 8, 4, 3, split_tails=False), [5, 6, 7, 8, 9])
    assert_columns(
        padded_row(columns, 0, 3, cut=False),
        {
            "input_ids": [5, 6, 7, 0],
            "labels": [6, 7, -100, -100],
            "loss_mask": [1, 1, 0, 0],
            "position_ids": [0, 1, 2, 3],
        },
    )
    assert padded_row(columns, 1, 3, cut=True)["input_ids"].tolist() == [8, 9]
    assert padded_row(columns, 2, 3, cut=True)["loss_mask"].tolist() == [0]
    assert padded_row(columns, 2, 3, cut=False)["loss_mask"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"create_compressed_eod_mask": False}, "create_compressed_eod_mask: must be True in mode packed"),
        ({"seq_length": 1024}, "seq_length: must be >= 2048 in mode packed .* got 1024; raise it"),
        ({"handler": [{"type": "PackingHandler"}]}, "handler: must be left out .* would shift them again; remove it"),
        ({"shuffle": True}, "shuffle: must be left out with VarlenDataLoader, got true; the plan shuffles by seed"),
        ({"create_attention_mask": True}, "create_attention_mask: .* not from a dense mask; set it to False"),
        ({"path": "alpaca"}, "path: must be left out .* name the text with data"),
        ({"data": None}, "data: either data or store must be given"),
        ({"longest_sample": 4096}, r"longest_sample: must be <= seq_length \(2048\), got 4096"),
        ({"rows": 8}, "rows: must be a known key, got 8; remove it; allowed here: seq_length, data"),
        ({"mode": "bucketed"}, 'mode: .* got "bucketed"; it is: packed: rows filled'),
        ({"mode": "padded"}, "create_compressed_eod_mask: must be False in mode padded"),
        ({"compressed_eod_mask_length": 2000}, "compressed_eod_mask_length: .* 1024, got 2000"),
        ({"pad_to": "batch"}, "pad_to, window: must be left out in mode packed"),
    ],
)
def test_wrong_loader_keys_are_refused_with_the_key_to_set(changes, message):
    keys = packed_keys({"source": "pydoc", "tokenizer": "bytes"}, **changes)
    with pytest.raises(RecipeError, match=message):
        read_loader_config(keys)


def test_harmless_keys_of_the_old_loader_may_stay():
    keys = packed_keys({"source": "pydoc", "tokenizer": "bytes"})
    old = {"shuffle": False, "create_attention_mask": False, "use_broadcast_data": True, "handler": None}
    assert read_loader_config({**keys, **old}) == read_loader_config(keys)


@pytest.mark.parametrize("columns", [PACKED_COLUMNS[:4], None, (*PACKED_COLUMNS[1:], "input_ids")])
def test_columns_that_lose_the_lengths_are_refused(columns):
    config = read_loader_config(packed_keys({"source": "pydoc", "tokenizer": "bytes"}))
    with pytest.raises(RecipeError, match="remove both: without actual_seq_len samples attend to each other"):
        check_columns(config, columns)


def test_padded_rows_need_ids_labels_and_mask():
    config = read_loader_config(padded_keys({"source": "pydoc", "tokenizer": "bytes"}))
    assert check_columns(config, ["labels", "input_ids", "loss_mask"]) == ("labels", "input_ids", "loss_mask")
    with pytest.raises(RecipeError, match=r"\(position_ids may be left out\) in mode padded"):
        check_columns(config, ["input_ids", "labels"])


@pytest.mark.parametrize("name", sorted(READY))
def test_the_ready_recipes_are_what_the_command_makes_and_pass_the_checks(name):
    path = ROOT / "recipes" / "mindformers" / name
    assert mindformers_yaml(ready_config(name)) == path.read_text()
    assert check_file(path) == ("CPU" if name == "qwen3_cpu.yaml" else "Ascend")


def test_every_file_of_the_folder_is_known():
    assert {path.name for path in (ROOT / "recipes" / "mindformers").iterdir()} == set(READY)


def changed(config: dict, path: str, value) -> dict:
    config = copy.deepcopy(config)
    *sections, key = path.split(".")
    place = config
    for name in sections:
        place = place[name]
    place[key] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.model_config.use_eod_reset", False, "use_eod_reset: must be True in mode packed, got False"),
        ("model.model_config.use_flash_attention", False, "use_flash_attention: must be True in mode packed"),
        ("model.model_config.seq_length", 4096, "seq_length: must equal .*seq_length (2048), got 4096"),
        ("train_dataset.input_columns", list(PACKED_COLUMNS[:4]), "input_columns must be ['input_ids', 'labels'"),
        ("train_dataset.construct_args_key", ["input_ids"], "construct_args_key: must equal input_columns"),
        ("train_dataset.dynamic_batch", True, "dynamic_batch: must be False with data_loader.mode packed"),
        ("train_dataset.eod_reset", True, "eod_reset: must be False, got True"),
        ("train_dataset.data_loader.create_compressed_eod_mask", False, "create_compressed_eod_mask: must be True"),
        ("train_dataset.data_loader.type", "HFDataLoader", "type: must be VarlenDataLoader, got 'HFDataLoader'"),
        ("runner_config.epochs", 2, "runner_config.epochs: must be 1, got 2"),
        ("runner_config.batch_size", 16, "batch_size * compressed_eod_mask_length must be <= 1024"),
        ("parallel.dataset_strategy", [[1, 1]] * 4, "dataset_strategy: must be [1, 1] for each of 5 columns"),
        ("runner_config.gradient_accumulation_steps", 2, "must be 1 outside of semi-automatic parallel, got 2"),
        ("micro_batch_interleave_num", 2, "micro_batch_interleave_num: must be 1 in mode packed, got 2"),
        ("runner_config.epochs", 0, "runner_config.epochs: must be 1, got 0"),
        ("train_dataset.repeat", 2, "train_dataset.repeat: must be 1, got 2"),
        ("model.model_config.vocab_size", 257, "vocab_size: must be >= 258, the ids of the tokenizer, got 257"),
        ("model.model_config.use_ring_attention", True, "use_ring_attention: must be False in mode packed"),
        ("model.model_config.model_type", "llama", "model_type: must be qwen3 with architectures Qwen3ForCausalLM"),
        ("parallel_config.context_parallel", 2, "context_parallel: must be 1 in mode packed, got 2"),
        ("lr_schedule.total_steps", 5, "total_steps: must equal train_dataset.data_loader.steps (20), got 5"),
        ("train_dataset_task", None, "train_dataset_task.type: must be CausalLanguageModelDataset"),
        ("train_dataset_task", {"type": "KeyWordGenDataset"}, "got KeyWordGenDataset; set train_dataset_task"),
        ("callbacks", [{"type": "MFLossMonitor"}], "callbacks: must have a VarlenMonitor, found none"),
        ("train_dataset.data_loader.data.tokenizer", "none.json", "train_dataset.data_loader.data.tokenizer: must be"),
        # Of another type than can be looked at.
        ("model.model_config.seq_length", "4096", 'seq_length: must be a whole number, without quotes, got "4096"'),
        ("runner_config.batch_size", True, "runner_config.batch_size: must be a whole number"),
        ("model.model_config.use_eod_reset", "True", "use_eod_reset: must be True or False, without quotes"),
        ("train_dataset.data_loader", "VarlenDataLoader", "train_dataset.data_loader: must be a section"),
        ("train_dataset.input_columns", "input_ids", "train_dataset.input_columns: must be a list of column names"),
        ("parallel", [1], "parallel: must be a section of keys and values, got [1]"),
        ("parallel.dataset_strategy", [1, 1], "dataset_strategy: must be [1, 1] for each of 5 columns, got [1, 1]"),
        ("callbacks", ["VarlenMonitor"], "callbacks: must be a list of sections, each with a type"),
        ("context", "CPU", "context: must be a section"),
    ],
)
def test_wrong_settings_of_mindformers_are_refused_with_the_key_to_set(path, value, message):
    config = ready_config("qwen3_cpu.yaml")
    assert config_faults(config) == []
    faults = config_faults(changed(config, path, value))
    assert len(faults) == 1
    for part in message.split(".*"):
        assert part in faults[0]


def test_a_full_batch_strategy_over_several_ranks_is_refused():
    config = changed(ready_config("qwen3_cpu.yaml"), "parallel_config.data_parallel", 2)
    faults = config_faults(changed(config, "parallel.dataset_strategy", "full_batch"))
    assert [fault.split(":")[0] for fault in faults] == ["parallel.dataset_strategy"]


def test_a_full_batch_switch_over_several_ranks_is_refused():
    config = changed(ready_config("qwen3_cpu.yaml"), "parallel_config.data_parallel", 2)
    assert config_faults(config) == []
    faults = config_faults(changed(config, "parallel.full_batch", True))
    assert len(faults) == 1
    assert "parallel.full_batch: must be False in mode packed with data_parallel > 1, got True" in faults[0]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.model_config.max_position_embeddings", 64),  # rotary angles need no table
        ("model.model_config.is_dynamic", True),
        ("model.model_config.use_attn_mask_compression", True),
        (
            "train_dataset_task.dataset_config",
            {"data_loader": {"type": "MindDataset"}},
        ),  # train_dataset takes its place
        ("lr_schedule.total_steps", -1),
        ("context", None),
    ],
)
def test_settings_that_change_nothing_are_let_be(path, value):
    assert config_faults(changed(ready_config("qwen3_cpu.yaml"), path, value)) == []


@pytest.mark.parametrize("content", [b"", b"- 1", b"text", b"1: {}", b"\xff\xfe\x00", b"a: 2020-13-45", b"a: [", b"{}"])
def test_a_file_of_anything_is_refused_with_faults(tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"any.yaml: 1 fault\n  (file|train_dataset.data_loader.type): must be"):
        check_file(tmp_path / "any.yaml")


def test_a_made_file_is_overwritten_only_by_force(tmp_path):
    recipe = load_recipe(ROOT / "recipes" / "packed.yaml", NO_EVALUATION)
    text = write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml")
    (tmp_path / "made.yaml").write_text("filled in by hand")
    with pytest.raises(RecipeError, match=r"--output: must be a new file, .* exists already; .* with --force"):
        write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml")
    assert (tmp_path / "made.yaml").read_text() == "filled in by hand"
    write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml", force=True)
    assert (tmp_path / "made.yaml").read_text() == text


def dynamic_config() -> dict:
    overrides = ["batch.pad_to=batch", "shapes.kind=range", "device.target=CPU", *NO_EVALUATION]
    return mindformers_config(load_recipe(ROOT / "recipes" / "padded.yaml", overrides), "llama", Devices())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "model.model_config.input_sliced_sig",
            False,
            "input_sliced_sig: must be True, got False: the model would shift",
        ),
        ("model.model_config.is_dynamic", False, "is_dynamic: must be True with pad_to batch"),
        ("model.model_config.seq_length", 2048, "seq_length: must be >= 2049, what dynamic_batch pads 2048 tokens to"),
        (
            "model.model_config.max_position_embedding",
            64,
            "max_position_embedding: must be >= model.model_config.seq_length",
        ),
        ("train_dataset.remainder", 0, "remainder: must be >= 1 with dynamic_batch, got 0"),
        ("train_dataset.pad_token_id", [0, -100], "pad_token_id: must give one value for each of"),
        ("train_dataset.dynamic_batch", False, "dynamic_batch: must be True with data_loader.mode padded"),
    ],
)
def test_wrong_settings_of_dynamic_batches_are_refused(path, value, message):
    config = dynamic_config()
    assert config_faults(config) == []
    faults = config_faults(changed(config, path, value))
    assert len(faults) == 1
    assert message in faults[0]


def test_dynamic_lengths_are_multiples_of_the_divisor_plus_the_remainder():
    assert [dynamic_length(tokens, 32, 1) for tokens in (1, 2, 33, 34, 256)] == [1, 33, 33, 65, 257]


@pytest.mark.parametrize(
    ("recipe", "family", "devices", "overrides", "message"),
    [
        ("bucketed.yaml", "llama", Devices(), [], "mode: must be packed, varlen or padded, got bucketed"),
        ("packed.yaml", "qwen3", Devices(), [], "architecture: must be qwen3 for MindFormers' qwen3, got llama"),
        ("packed.yaml", "llama", Devices(pipeline_stage=2), [], "batch.micro_batches: must be >= the pipeline stages"),
        ("packed.yaml", "llama", Devices(model_parallel=8), [], "model_parallel: must divide num_key_value_heads"),
        ("packed.yaml", "llama", Devices(), ["device.target=CPU"], "must be padded for the legacy Llama on a CPU"),
    ],
)
def test_what_mindformers_models_lack_is_refused(recipe, family, devices, overrides, message):
    with pytest.raises(RecipeError, match=message):
        mindformers_config(load_recipe(ROOT / "recipes" / recipe, overrides), family, devices)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (Devices(), (4, 1, False)),
        (Devices(data_parallel=2), (1, 4, True)),
        (Devices(pipeline_stage=2), (1, 1, True)),
    ],
)
def test_a_step_of_several_micro_batches_is_split_where_mindformers_can(devices, expected):
    overrides = ["batch.micro_batches=4", "device.target=Ascend", *NO_EVALUATION]
    config = mindformers_config(load_recipe(ROOT / "recipes" / "packed.yaml", overrides), "llama", devices)
    runner = config["runner_config"]
    found = runner["batch_size"], runner["gradient_accumulation_steps"], config["calculate_per_token_loss"]
    assert found == expected
    assert config["parallel_config"]["micro_batch_num"] == (4 if devices.pipeline_stage > 1 else 1)


def test_each_sample_is_fed_once_over_the_ranks_in_equal_steps(corpus):
    feeds = [open_feed(packed_keys(corpus), PACKED_COLUMNS, 2, rank, 2) for rank in range(2)]
    steps = feeds[0].steps
    assert [len(feed) for feed in feeds] == [2 * steps, 2 * steps]
    planned = np.concatenate([feeds[0].sample_ids(step) for step in range(steps)])
    assert np.unique(planned).size == planned.size
    table, fed = feeds[0].workload.store.train, []
    for feed in feeds:
        for index in range(len(feed)):
            row = feed.row(index)
            starts = np.flatnonzero(row["position_ids"] == 0)
            real = row["input_ids"][starts] != feed.workload.store.pad_id
            fed += [
                tuple(row["input_ids"][start:end])
                for start, end in zip(starts[real], row["actual_seq_len"][: real.sum()], strict=True)
            ]
    assert sorted(fed) == sorted(tuple(table.tokens(int(sample))) for sample in planned)


def test_the_feed_trains_what_our_own_recipe_would(corpus, tmp_path):
    overrides = [
        *(f"data.{key}={value}" for key, value in corpus.items()),
        "data.eval_fraction=0",
        "train.eval_every=null",
        "batch.token_budget=2048",
        "batch.max_segments=128",
        "train.seed=5",
        "model.seq_length=512",
        "model.max_position_embeddings=512",
    ]
    ours = prepare(load_recipe(ROOT / "recipes" / "packed.yaml", overrides))
    feed = open_feed(packed_keys(corpus, seed=5, longest_sample=512), PACKED_COLUMNS)
    plan = ours.plans.epoch(0)
    assert feed.steps == plan.num_steps
    for step in range(feed.steps):
        np.testing.assert_array_equal(feed.sample_ids(step), plan.step_ids(step))


def test_steps_go_on_over_epochs_with_other_orders(corpus):
    per_epoch = open_feed(packed_keys(corpus), PACKED_COLUMNS).steps
    feed = open_feed(packed_keys(corpus, steps=3 * per_epoch), PACKED_COLUMNS)
    places = [feed.place(step) for step in range(feed.steps)]
    assert places[0].epoch == 0
    assert {place.epoch for place in places} >= {0, 1, 2}
    first = [feed.sample_ids(step) for step, place in enumerate(places) if place.epoch == 0]
    second = [feed.sample_ids(step) for step, place in enumerate(places) if place.epoch == 1]
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))
    assert np.array_equal(feed.sample_ids(0), first[0])  # looking back is a look-up, too


def write_run(folder: Path, feed: Feed, steps: int) -> None:
    """The files that the monitor leaves."""
    plan = {
        "plan_fingerprint": feed.workload.plans.fingerprint,
        "data_fingerprint": feed.workload.store.fingerprint,
        "settings": feed.plan_state(0)["settings"],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [{"step": step, "place": vars(feed.place(step))} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_count_of_mindformers_is_a_place_in_our_plan(corpus, tmp_path):
    feed = open_feed(packed_keys(corpus, steps=40), PACKED_COLUMNS)
    write_run(tmp_path, feed, 40)
    for steps in (0, 1, 7, 40):
        state = saved_plan_state(tmp_path, steps)
        assert state == json.loads(json.dumps(feed.plan_state(steps)))
        assert feed.workload.plans.resume(state) == feed.place(steps)
    with pytest.raises(CheckpointError, match="must hold step 41"):
        saved_plan_state(tmp_path, 41)


def test_going_on_with_another_plan_is_refused(corpus, tmp_path):
    feed, other = (open_feed(packed_keys(corpus, seed=seed), PACKED_COLUMNS) for seed in (0, 1))
    write_run(tmp_path, feed, 1)
    data = feed.workload.store.fingerprint
    check_plan(tmp_path, feed.workload.plans.fingerprint, data)
    with pytest.raises(CheckpointError, match="corpus, seed, batch or ranks changed"):
        check_plan(tmp_path, other.workload.plans.fingerprint, data)
    with pytest.raises(CheckpointError, match=r"data.source .*plan.json .*begin anew without load_checkpoint"):
        check_plan(tmp_path, feed.workload.plans.fingerprint, "0" * 32)
    with pytest.raises(CheckpointError, match="must be there to go on from a step of MindFormers"):
        check_plan(tmp_path / "nowhere", "", "")


def test_figures_count_all_ranks(corpus):
    feed = open_feed(packed_keys(corpus), PACKED_COLUMNS, 1, 0, 2)
    figures = feed.figures(0)
    lengths = np.asarray(feed.workload.store.train.lengths)[feed.sample_ids(0)]
    assert figures["tokens_computed"] == 2 * 2048
    assert figures["tokens_real"] == lengths.sum()
    assert figures["tokens_supervised"] == (lengths - 1).sum()
    assert figures["segments"] == lengths.size
    assert figures["pad_ratio"] == 1 - lengths.sum() / 4096
    assert 0 <= figures["imbalance"] < 1
    assert feed.ledger(feed.steps)["tokens"]["balanced"]


def test_a_prepared_store_gives_the_same_rows(corpus):
    from_text = open_feed(packed_keys(corpus), PACKED_COLUMNS)
    keys = packed_keys(corpus, store=str(from_text.workload.store.folder), longest_sample=2048)
    del keys["data"]
    from_store = open_feed(keys, PACKED_COLUMNS)
    for index in (0, 1):
        for name, values in from_text.row(index).items():
            np.testing.assert_array_equal(values, from_store.row(index)[name])
    with pytest.raises(DataError, match="must hold samples of at most 100 tokens"):
        open_feed({**keys, "longest_sample": 100}, PACKED_COLUMNS)


def test_the_loader_is_a_data_set_that_skips_to_a_step(corpus):
    columns, keys = list(PACKED_COLUMNS), packed_keys(corpus, steps=9)
    feed = open_feed(keys, columns, 2, 1, 2)
    dataset = VarlenDataLoader(column_names=columns, num_shards=2, shard_id=1, batch_size=2, **keys)
    remembered = remembered_feed()
    assert remembered is not None
    assert remembered.workload.plans.fingerprint == feed.workload.plans.fingerprint
    batched = dataset.batch(2, drop_remainder=True)
    assert batched.get_dataset_size() == 9
    batched.set_init_step(6)  # what MindFormers does when it goes on after step 6
    batches = list(batched.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert len(batches) == 3
    for step, batch in enumerate(batches, start=6):
        for name in columns:
            np.testing.assert_array_equal(batch[name], [feed.row(2 * step)[name], feed.row(2 * step + 1)[name]])


def test_the_loaders_faults_survive_mindformers_making_the_error_anew(corpus):
    with pytest.raises(DataError, match=r"2 faults\n  handler: .*\n  seq_length: ") as caught:
        VarlenDataLoader(column_names=None, dataset_dir=None, data=corpus, seq_length=1, handler=[])
    assert "handler" in str(type(caught.value)(f"VarlenDataLoader: {caught.value}"))


def test_rows_for_dynamic_batches_are_as_long_as_their_samples(corpus):
    feed = open_feed(padded_keys(corpus, pad_to="batch", window=32), PACKED_COLUMNS[:3], 4)
    lengths = np.asarray(feed.workload.store.train.lengths)
    for step in (0, 3):
        rows = [feed.row(4 * step + row) for row in range(4)]
        assert [row["input_ids"].size for row in rows] == lengths[feed.sample_ids(step)].tolist()
        assert all(row["loss_mask"].sum() == row["input_ids"].size - 1 for row in rows)


def test_the_command_names_a_fault_and_the_file(tmp_path, capsys):
    assert main([str(tmp_path / "nothing.yaml")]) == 1
    assert "nothing.yaml: 1 fault\n  file: must be readable YAML" in capsys.readouterr().err
    assert main([]) == 2


HIDDEN = """
import importlib, pkgutil, sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mindformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mindformers" else find(name, *rest)
import ms_varlen
failed = []
for module in pkgutil.walk_packages(ms_varlen.__path__, "ms_varlen."):
    if module.name == "ms_varlen.diagnose.bench_torch":  # takes 10 s, needs torch
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed.append((module.name, error.name.split(".")[0]))
    except ms_varlen.errors.VarlenError as error:
        failed.append((module.name, str(error)))
from ms_varlen.bridge.run import main
from ms_varlen.cli import main as command
status = command(["mindformers-recipe", "recipes/packed.yaml", "--family", "llama", "--output", sys.argv[2]])
print([failed, status, main([sys.argv[1]])])
"""


def test_without_mindformers_all_else_works_and_the_bridge_says_what_to_install(tmp_path):
    arguments = ["recipes/mindformers/qwen3_cpu.yaml", str(tmp_path / "made.yaml")]
    run = subprocess.run(
        [sys.executable, "-c", "import importlib.util\n" + HIDDEN, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    failed, status, of_bridge = eval(run.stdout.splitlines()[-1])
    assert (status, of_bridge) == (0, 1)
    advice = "install it with pip install 'ms_varlen[mindformers]' or pip install 'mindformers==1.9.*'"
    assert advice in run.stderr
    causes = dict(failed)
    assert {name for name, cause in causes.items() if cause == "mindformers"} == {
        "ms_varlen.bridge.cpu",
        "ms_varlen.bridge.monitor",
        "ms_varlen.diagnose.bench_mindformers",
    }
    assert advice in causes["ms_varlen.bridge.register"]
    assert config_faults(yaml.safe_load((tmp_path / "made.yaml").read_text())) == []
