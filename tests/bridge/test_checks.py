import pytest

from ms_varlen.bridge.checks import config_faults
from ms_varlen.bridge.config import PACKED_COLUMNS, check_columns, dynamic_length, read_loader_config
from ms_varlen.bridge.recipes import Devices, mindformers_config
from ms_varlen.bridge.run import check_file, main
from ms_varlen.errors import RecipeError
from ms_varlen.recipe.recipe import load_recipe
from tests.support.bridge_cases import NO_EVALUATION, ROOT, changed, packed_keys, padded_keys, ready_config


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
        ({"window": 4}, "pad_to, window: must be left out in mode packed"),
        ({"divisor": 64, "remainder": 1}, "divisor, remainder: must be left out but with pad_to batch"),
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
        (
            "model.model_config.mtp_num_layers",
            1,
            "mtp_num_layers: must be 0 in mode packed, got 1: it shifts labels over",
        ),
        ("model.model_config.num_nextn_predict_layers", 1, "num_nextn_predict_layers: must be 0 in mode packed, got 1"),
        ("model.model_config.ignore_token_id", 5, "ignore_token_id: must be no token, got 5"),
        ("model.model_config.ignore_token_id", 0, "ignore_token_id: must be no token, got 0"),
        ("parallel_config.seq_split_num", 2, "parallel_config.seq_split_num: must be 1 in mode packed, got 2"),
        ("ignore_data_skip", True, "ignore_data_skip: must be left out, got True: a resumed run would train other"),
        ("data_skip_steps", 3, "data_skip_steps: must be left out, got 3: a resumed run would train other samples"),
        ("runner_config.batch_size", 0, "runner_config.batch_size: must be a whole number >= 1, got 0"),
        (
            "train_dataset.data_loader.compressed_eod_mask_length",
            1,
            "data_loader.compressed_eod_mask_length: must be >= 2 (one sample, and the longest padded tail)",
        ),
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


def test_every_line_that_a_fine_tuning_yaml_forgot_is_named_at_once():
    config = changed(ready_config("qwen3_cpu.yaml"), "train_dataset.data_loader.handler", [{"type": "PackingHandler"}])
    config = changed(config, "train_dataset.data_loader.split", "train")
    config = changed(config, "train_dataset.input_columns", list(PACKED_COLUMNS[:4]))
    config = changed(config, "parallel.dataset_strategy", [[1, 1]] * 4)
    config = changed(config, "model.model_config.use_eod_reset", False)
    assert [fault.split(":")[0].split(" ")[0] for fault in config_faults(config)] == [
        "train_dataset.data_loader.handler",
        "train_dataset.data_loader.split",
        "train_dataset.input_columns",
        "model.model_config.use_eod_reset",
        "parallel.dataset_strategy",
    ]


def test_a_section_data_without_keys_is_refused_and_means_no_corpus_of_ours():
    faults = config_faults(changed(ready_config("qwen3_cpu.yaml"), "train_dataset.data_loader.data", {}))
    keys = ["train_dataset.data_loader.data.source", "train_dataset.data_loader.data.tokenizer"]
    assert [fault.split(":")[0] for fault in faults] == keys


def test_a_sink_that_leaves_out_the_last_steps_is_refused():
    config = ready_config("qwen3_1p.yaml")
    steps = config["train_dataset"]["data_loader"]["steps"]
    assert config["runner_config"]["sink_mode"]
    assert steps % 3
    assert config_faults(changed(config, "runner_config.sink_size", 2)) == []
    faults = config_faults(changed(config, "runner_config.sink_size", 3))
    assert len(faults) == 1
    assert f"sink_size: must divide train_dataset.data_loader.steps ({steps}), got 3: the last" in faults[0]


def test_a_sink_on_a_cpu_which_would_repeat_all_samples_is_refused_left_out_too():
    config = ready_config("qwen3_cpu.yaml")
    without = changed(config, "runner_config", {"epochs": 1, "batch_size": 1})  # MindFormers sinks then
    for wrong in (changed(config, "runner_config.sink_mode", True), without):
        faults = config_faults(wrong)
        assert len(faults) == 1
        assert "runner_config.sink_mode: must be False on a CPU, got True: each sink would be a pass" in faults[0]


def test_rows_for_dynamic_batches_need_the_sizes_that_mindformers_pads_to():
    keys = padded_keys({"source": "pydoc", "tokenizer": "bytes"}, pad_to="batch")
    with pytest.raises(RecipeError, match="divisor, remainder: must be those of train_dataset with pad_to batch"):
        read_loader_config(keys)


def test_a_full_batch_strategy_over_several_ranks_is_refused():
    config = changed(ready_config("qwen3_cpu.yaml"), "parallel_config.data_parallel", 2)
    faults = config_faults(changed(config, "parallel.dataset_strategy", "full_batch"))
    assert [fault.split(":")[0] for fault in faults] == ["parallel.dataset_strategy"]


def test_a_full_batch_switch_over_several_ranks_is_refused_left_out_too():
    config = changed(ready_config("qwen3_8b_8p.yaml"), "parallel_config.data_parallel", 2)
    assert config_faults(config) == []
    left_out = {key: value for key, value in config["parallel"].items() if key != "full_batch"}  # MindFormers: True
    for wrong in (changed(config, "parallel.full_batch", True), changed(config, "parallel", left_out)):
        faults = config_faults(wrong)
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
        ("train_dataset.remainder", 0, "must be 1 <= remainder < divisor with dynamic_batch, got 64 and 0"),
        ("train_dataset.remainder", 64, "must be 1 <= remainder < divisor with dynamic_batch, got 64 and 64"),
        ("train_dataset.divisor", 32, "divisor, remainder: must be those of train_dataset (32, 1), got 64 and 1"),
        (
            "train_dataset.pad_token_id",
            [0, -100, 1],
            'without loss, got [0, -100, 1]; set ["the tokenizer\'s", -100, 0]',
        ),
        ("train_dataset.pad_token_id", [0, 0, 0], "pad_token_id: must give one value for each of"),
        ("train_dataset.pad_token_id", [-5, -100, 0], "pad_token_id: must give one value for each of"),
        ("train_dataset.pad_token_id", ["0", -100, 0], "pad_token_id: must give one value for each of"),
        ("train_dataset.pad_token_id", None, "pad_token_id: must give one value for each of"),
        ("train_dataset.data_loader.longest_sample", 100, "longest_sample: must be left out in mode padded, got 100"),
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


def test_the_command_names_a_fault_and_the_file(tmp_path, capsys):
    assert main([str(tmp_path / "nothing.yaml")]) == 1
    assert "nothing.yaml: 1 fault\n  file: must be readable YAML" in capsys.readouterr().err
    assert main([]) == 2
