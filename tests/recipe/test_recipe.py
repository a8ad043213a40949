import inspect
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.errors import RecipeError
from ms_varlen.faults import BROUGHT_NAMES, key_paths
from ms_varlen.recipe.recipe import Recipe, load_recipe, parse_recipe, recipe_schema

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
QUICKSTART = next(path for path in RECIPES if path.stem == "quickstart")
PADDED = next(path for path in RECIPES if path.stem == "padded")
KEYS_AT_TOP = "allowed here: mode, data, batch, shapes, model, train, graph, checkpoint, device"


FETCHED = {"smollm2_cpu": ("model.config={hidden_size: 64}", "model.init_from=null", "data.tokenizer=bytes")}
"""What stands for the files that a recipe wants fetched first."""


def faults_of(*overrides: str, recipe: Path = QUICKSTART) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides)
    return caught.value.faults


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_its_resolved_form_gives_the_same_recipe(path):
    recipe = load_recipe(path, FETCHED.get(path.stem, ()))
    resolved = yaml.safe_load(yaml.safe_dump(recipe.resolved()))
    assert parse_recipe(resolved) == recipe
    assert parse_recipe(resolved).resolved() == recipe.resolved()


def test_the_shipped_recipes_are_found():
    shipped = {"align_cpu", "bench_cpu", "bucketed", "packed", "padded", "quickstart"}
    assert {path.stem for path in RECIPES} >= shipped


def test_resolved_holds_every_default():
    resolved = load_recipe(QUICKSTART).resolved()
    assert resolved["batch"] == {
        "rows": None,
        "token_budget": 4096,
        "pad_to": None,
        "window": None,
        "micro_batches": 1,
        "max_segments": 256,
    }
    assert resolved["device"] == {
        "target": "auto",
        "max_memory": None,
        "deterministic": False,
        "hccl_connect_seconds": 600,
        "hccl_exec_seconds": 1836,
        "profile_steps": None,
    }
    assert resolved["train"]["learning_rate"] == 1e-3
    assert resolved["checkpoint"]["output_dir"] == "output/quickstart"


def test_defaults_of_the_batch_follow_the_rows():
    assert load_recipe(QUICKSTART, ["batch={}"]).batch.token_budget == 4096
    padded = load_recipe(PADDED, ["batch={rows: 4}"]).batch
    assert (padded.rows, padded.pad_to, padded.token_budget) == (4, "max", None)


def test_a_quickstart_recipe_can_be_overridden_into_a_padded_one():
    overrides = ["mode=padded", "batch.rows=8", "batch.token_budget=null", "model.variable_seq_lengths=false"]
    assert load_recipe(QUICKSTART, overrides).mode == "padded"


def test_five_faults_are_reported_at_once():
    faults = faults_of(
        "length_buckets=[128, 256]",
        "model.max_position_embeddings=4096",
        "batch.token_budget=1024",
        "model.variable_seq_lengths=false",
        "data.source=gone.jsonl",
    )
    assert faults == [
        f"length_buckets: must be a known key, got [128, 256]; use shapes.kind and shapes.row_buckets; {KEYS_AT_TOP}",
        "data.source: must be an existing file or folder, got gone.jsonl; correct the path or use 'pydoc', which needs "
        "none",
        "batch.token_budget: must be >= model.seq_length (2048), got 1024; raise it, or lower model.seq_length",
        "model.max_position_embeddings: must equal model.seq_length (2048), got 4096; set both to the longest sequence "
        "to train",
        "model.variable_seq_lengths: must be true in a varlen recipe, got false; set it to true, or choose mode: "
        "padded",
    ]


def test_the_error_names_the_file_and_counts_its_faults():
    with pytest.raises(RecipeError, match=r"quickstart.yaml: 2 faults\n  train.steps: .*\n  batch.rows: "):
        load_recipe(QUICKSTART, ["batch.rows=8", "train.steps=0"])


def test_reading_a_recipe_takes_under_three_seconds():
    code = (
        "import sys; from ms_varlen.errors import RecipeError; from ms_varlen.recipe.recipe import load_recipe\n"
        f"load_recipe({str(QUICKSTART)!r})\n"
        f"try: load_recipe({str(QUICKSTART)!r}, ['train.steps=0', 'lr=1'])\n"
        "except RecipeError as error: print(len(error.faults))"
    )
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "2\n"
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "train.steps=0",
            "train.steps: must be a whole number >= 1, got 0; change it (optimizer steps of the whole run)",
        ),
        ("train.steps=1.5", "train.steps: must be a whole number >= 1, got 1.5; "),
        ("train.steps=true", "train.steps: must be a whole number >= 1, got true; "),
        ("train.steps='8'", 'train.steps: must be a whole number >= 1, got "8"; '),
        ("train.learning_rate=0", "train.learning_rate: must be a number > 0, got 0; "),
        ("train.learning_rate=.inf", 'train.learning_rate: must be a number > 0, got ".inf"; '),
        ("train.beta2=1", "train.beta2: must be a number >= 0 and < 1, got 1; "),
        ("train.clip_grad_norm=0", "train.clip_grad_norm: must be a number > 0 or null, got 0; "),
        ("train.schedule=cos", 'train.schedule: must be cosine, linear or constant, got "cos"; '),
        ("train=3", "train: must be a mapping of keys (at least steps, learning_rate), got 3; "),
        ("train=null", "train: must be a mapping of keys (at least steps, learning_rate), got null; "),
        ("mode=sorted", 'mode: must be padded, bucketed, packed or varlen, got "sorted"; '),
        ("shapes.kind=symbol", 'shapes.kind: must be static, buckets or range, got "symbol"; '),
        ("model.variable_seq_lengths=yes", 'model.variable_seq_lengths: must be true or false, got "yes"; '),
        ("model.attention_dropout=0.1", "model.attention_dropout: must be 0.0, got 0.1"),
        ("model.config={}", "model.config.hidden_size: must be a whole number > 0, but is missing; add it"),
        (
            "model.config.num_key_value_heads=3",
            "model.config.num_key_value_heads: must divide num_attention_heads (4), ",
        ),
        ("device.max_memory=3gb", "device.max_memory: must be text of another form or null, got "),
        ("device.target=GPU", 'device.target: must be auto, CPU or Ascend, got "GPU"; '),
        ("batch.max_segments=1025", "batch.max_segments: must be a whole number >= 1 and <= 1024, got 1025; "),
        ("batch=[1]", "batch: must be a mapping of keys, got [1]; "),
    ],
)
def test_a_wrong_value_is_one_fault_that_says_what_is_allowed(override, fault):
    faults = faults_of(override)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ["batch.token_budget=4100"],
            "batch.token_budget: must be a multiple of shapes.divisor (64), got 4100; use 4096",
        ),
        (["batch.token_budget=null"], "batch.token_budget: must be a whole number >= 1 in a varlen recipe, got null; "),
        (["batch.rows=8"], "batch.rows: must be left out in a varlen recipe, got 8; "),
        (["batch.pad_to=max"], "batch.pad_to: must be left out (null) in a varlen recipe, got max; "),
        (["batch.max_segments=1"], "batch.max_segments: must be >= 2 (one sample, and the longest"),
        (
            ["shapes.kind=static", "batch.max_segments=2"],
            "batch.max_segments: must be >= 3 (one sample, and the longest",
        ),
        (["shapes.max=2048"], "shapes.max: must be >= batch.token_budget (4096), got 2048; "),
        (["shapes.max=4100"], "shapes.max: must be a multiple of shapes.divisor (64), got 4100; "),
        (["shapes.kind=static", "shapes.max=8192"], "shapes.max: must equal batch.token_budget (4096), got 8192; "),
        (["shapes.kind=static", "shapes.min=64"], "shapes.min: must be null with kind: static"),
        (["shapes.row_buckets=auto"], "shapes.row_buckets: must be null in a varlen recipe with shapes.kind range"),
        (["shapes.token_sizes=[64]"], "shapes.token_sizes: must be null in a varlen recipe with shapes.kind range"),
        (
            ["shapes.kind=buckets", "shapes.token_sizes=[1024, 2048]"],
            "shapes.token_sizes: must end with batch.token_budget (4096), got 2048; ",
        ),
        (
            ["shapes.kind=buckets", "shapes.token_sizes=[2048, 1024, 4096]"],
            "shapes.token_sizes[1]: must be > the size before it (2048), got 1024; ",
        ),
        (
            ["mode=bucketed", "shapes.row_buckets=[true, 2048, a]"],
            "shapes.row_buckets[0]: must be a whole number, got true; change it (tokens, lengths of rows",
        ),
        (
            ["mode=bucketed", "shapes.row_buckets=[100, 2048]"],
            "shapes.row_buckets[0]: must be a multiple of shapes.divisor (64), got 100; use 64 or 128",
        ),
        (["shapes.num_buckets=4"], "shapes.num_buckets: must be null unless sizes are picked (auto), got 4; "),
        (["batch.window=100"], "batch.window: is only allowed in padded recipes with batch.pad_to batch, got 100; "),
        (["shapes.min=100"], "shapes.min: must be a multiple of shapes.divisor (64), got 100; use 64 or 128"),
        (["shapes.min=4096"], "shapes.min: must be < the largest size (4096 tokens), got 4096; "),
        (["shapes.min=8192", "shapes.max=4096"], "shapes.min: must be <= max (4096), got 8192"),
        (["shapes.divisor=4096"], "shapes.divisor: must be < the largest size (4096 tokens), got 4096; "),
        (["data.min_tokens=4000"], "data.min_tokens: must be <= model.seq_length (2048), got 4000; "),
        (["data.tokenizer=gone.json"], "data.tokenizer: must be an existing file or folder, got gone.json; "),
        (["data.eval_fraction=0"], "train.eval_every: must be null when data.eval_fraction is 0, got 50; "),
        (["graph.max_graphs=2"], "graph.max_graphs: must be >= 3 (one graph per role), got 2; "),
        (
            ["checkpoint.resume=atuo"],
            "checkpoint.resume: must be auto, never or an existing checkpoint folder, got atuo",
        ),
        (
            [f"checkpoint.output_dir={QUICKSTART}"],
            "checkpoint.output_dir: must be a folder or not exist, got the file ",
        ),
        ([f"graph.compile_cache={QUICKSTART}"], "graph.compile_cache: must be auto, off or a folder, got the file "),
        (
            ["device.target=Ascend", "model.config.head_dim=24"],
            "model.config.head_dim: must be a multiple of 16 and <= 512 on Ascend, got 24; ",
        ),
        (
            ["device.target=Ascend", "model.config.num_attention_heads=512", "model.config.head_dim=16"],
            "model.config.num_attention_heads: must be <= 256 on Ascend, got 512; ",
        ),
    ],
)
def test_a_broken_rule_between_keys_of_a_varlen_recipe_is_one_fault(overrides, fault):
    faults = faults_of(*overrides)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["batch.rows=null"], "batch.rows: must be a whole number >= 1 in a padded recipe, but is missing; "),
        (["batch.token_budget=4096"], "batch.token_budget: must be left out (null) in a padded recipe, got 4096; "),
        (["batch.rows=300"], "batch.rows: must be <= batch.max_segments (256), since each row is a segment, got 300; "),
        (["shapes.kind=static"], "batch.pad_to: must be max with shapes.kind static, got batch; "),
        (["shapes.max=8192"], "shapes.max: must be >= batch.rows * model.seq_length (16384), got 8192; "),
        (["shapes.min=1024"], "shapes.min: must be <= batch.rows * shapes.divisor (512, the smallest micro-batch), "),
        (
            ["shapes.divisor=48"],
            "model.seq_length: must be a multiple of shapes.divisor (48), got 2048; use 2016 or 2064",
        ),
        (
            ["model.variable_seq_lengths=true"],
            "model.variable_seq_lengths: must be false in a padded recipe, got true; ",
        ),
    ],
)
def test_a_broken_rule_between_keys_of_a_padded_recipe_is_one_fault(overrides, fault):
    faults = faults_of(*overrides, recipe=PADDED)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        (
            "train.step=60",
            "train.step: must be a known key, got 60; use train.steps; allowed here: steps, learning_rate, ",
        ),
        ("traim={steps: 3}", 'traim: must be a known key, got {"steps": 3}; use train; '),
        ("data.seq_length=512", "data.seq_length: must be a known key, got 512; use model.seq_length; "),
        (
            "model.config.hiden_size=64",
            "model.config.hiden_size: must be a known key, got 64; use model.config.hidden_size",
        ),
        ("zzz=1", f"zzz: must be a known key, got 1; remove it; {KEYS_AT_TOP}"),
        ("lr=1", "lr: must be a known key, got 1; use train.learning_rate; "),
        ("train.num_epochs=3", "train.num_epochs: must be a known key, got 3; use train.steps (optimizer steps, not "),
        ("batch.batch_size=3", "batch.batch_size: must be a known key, got 3; use batch.token_budget and batch.rows; "),
        ("actual_seq_lengths=3", "actual_seq_lengths: must be a known key, got 3; remove it: the data set carries "),
        ("max_seq_len=3", "max_seq_len: must be a known key, got 3; use model.seq_length and model.max_position_emb"),
    ],
)
def test_an_unknown_key_is_one_fault_that_points_to_ours(override, advice):
    faults = faults_of(override)
    assert len(faults) == 1
    assert faults[0].startswith(advice)


def test_names_that_people_bring_point_to_keys_that_exist():
    known = set(key_paths(Recipe))
    assert len(BROUGHT_NAMES) > 50
    assert {path for paths, _ in BROUGHT_NAMES.values() for path in paths} <= known
    assert not set(BROUGHT_NAMES) & {path.rpartition(".")[2] for path in known}


def test_a_misspelled_key_hides_what_follows_from_it(tmp_path):
    text = QUICKSTART.read_text(encoding="utf-8")
    for key, misspelled in [("steps:", "step:"), ("\nmodel:", "\nmodl:"), ("  seq_length", "  max_seq_len")]:
        path = written(tmp_path, text.replace(key, misspelled, 1))
        assert len(faults_of(recipe=path)) == 1


def test_missing_sections_are_one_fault_each(tmp_path):
    assert [fault.split(", but is missing")[0] for fault in faults_of(recipe=written(tmp_path, "mode: varlen"))] == [
        "data: must be a mapping of keys (at least source, tokenizer)",
        "model: must be a mapping of keys (at least config, variable_seq_lengths, seq_length, max_position_embeddings)",
        "train: must be a mapping of keys (at least steps, learning_rate)",
        "checkpoint: must be a mapping of keys (at least output_dir)",
    ]


FAULTS = {
    "zzz=1": "zzz",
    "train.steps=0": "train.steps",
    "train.eval_every=0": "train.eval_every",
    "batch.token_budget=1000": "batch.token_budget",
    "batch.rows=8": "batch.rows",
    "batch.max_segments=1": "batch.max_segments",
    "shapes.min=100": "shapes.min",
    "model.variable_seq_lengths=false": "model.variable_seq_lengths",
    "model.max_position_embeddings=4096": "model.max_position_embeddings",
    "data.source=gone.jsonl": "data.source",
    "checkpoint.resume=gone": "checkpoint.resume",
    "model.config.hidden_size=-1": "model.config.hidden_size",
    "device.target=TPU": "device.target",
}


@settings(max_examples=50, deadline=None)  # a busy machine is no fault
@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=1))
def test_faults_neither_hide_nor_cause_one_another(chosen):
    faults = [fault.split(": ")[0] for fault in faults_of(*sorted(chosen))]
    twice = ["batch.token_budget"] if "batch.token_budget=1000" in chosen else []  # below seq_length, and no multiple
    assert sorted(faults) == sorted([FAULTS[fault] for fault in chosen] + twice)


def test_every_pair_of_sections_can_be_faulty_at_once():
    pairs = list(
        itertools.combinations(["data", "batch", "shapes", "model", "train", "graph", "checkpoint", "device"], 2)
    )
    for pair in pairs:
        assert [fault.split(":")[0] for fault in faults_of(*(f"{name}=3" for name in pair))] == list(pair)
    assert len(pairs) == 28


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1000.0),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("010", 10),
        ("off", "off"),
        ("'1e-3'", "1e-3"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("~", None),
        ("true", True),
        ("[1, a]", [1, "a"]),
    ],
)
def test_plain_values_are_read_without_yaml_surprises(text, value):
    shown = json.dumps(value)
    assert faults_of(f"zzz={text}")[0].startswith(f"zzz: must be a known key, got {shown}; ")


def test_compile_cache_off_is_a_word():
    assert load_recipe(QUICKSTART, ["graph.compile_cache=off"]).graph.compile_cache == "off"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "file: must hold a mapping of sections, got an empty file; start with mode: varlen"),
        ("# nothing\n", "file: must hold a mapping of sections, got an empty file; start with mode: varlen"),
        ("varlen", 'file: must hold a mapping of sections, got line 1: "varlen"; start with mode: varlen'),
        ("\n- 1\n", "file: must hold a mapping of sections, got line 2: [1]; start with mode: varlen"),
        ("mode: varlen\ntrain: {steps: 3\n", "line 3, column 1: expected ',' or '}', but got '<stream end>'"),
        ("mode: varlen\n---\nmode: padded\n", "line 2, column 1: but found another document"),
        (
            "runner_config:\n  epochs: 1\n",
            "file: must be a recipe of ms_varlen, got a YAML of MindFormers; run it with python -m ms_varlen.bridge",
        ),
        ("mode: &m varlen\ntrain: *m\n", "line 2, column 8: aliases (*name) and tags (!name) are not allowed"),
        ("mode: !!python/name:os.system x\n", "line 1, column 7: aliases (*name) and tags (!name) are not allowed"),
        ("mode: \x07\n", "unacceptable character #x0007"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_fault_with_its_line(tmp_path, text, fault):
    faults = faults_of(recipe=written(tmp_path, text))
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_a_file_that_cannot_be_read_is_one_fault(tmp_path):
    assert faults_of(recipe=tmp_path / "gone.yaml") == [
        "file: must be readable, got 'No such file or directory'; check the path of the recipe"
    ]
    assert faults_of(recipe=tmp_path)[0].startswith("file: must be readable, got 'Is a directory'; ")
    (tmp_path / "latin.yaml").write_bytes(b"mode: \xe9")
    assert faults_of(recipe=tmp_path / "latin.yaml") == [
        "file: must be UTF-8 text, got byte 0xe9 at 6; save it as UTF-8"
    ]


def test_duplicate_keys_are_faults_with_both_lines_and_hide_nothing_else(tmp_path):
    text = QUICKSTART.read_text(encoding="utf-8").replace("  steps: 200\n", "  steps: 200\n  steps: 10\n")
    line = text.splitlines().index("  steps: 200") + 1
    faults = faults_of("batch.rows=8", recipe=written(tmp_path, text))
    assert faults[0] == f"train.steps: must be given once, got it on lines {line} and {line + 1}; remove one"
    assert [fault.split(":")[0] for fault in faults] == ["train.steps", "batch.rows"]


def test_a_dotted_key_in_the_file_is_told_to_nest(tmp_path):
    path = written(tmp_path, "train.seed: 3\n" + QUICKSTART.read_text(encoding="utf-8"))
    assert faults_of(recipe=path) == [
        '"train.seed": must be nested in its section, got 3; write a.b as a: {b: ...}',
    ]


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("steps", "override: must be section.key=value, such as train.steps=100 (null unsets a value), got 'steps'; "),
        ("=3", "override: must be section.key=value, such as train.steps=100 (null unsets a value), got '=3'; "),
        ("train.steps=", "override: must be section.key=value, such as train.steps=100 (null unsets a value), got "),
        ("train.steps=[1", "train.steps: must be given a YAML value, got 'train.steps=[1' (line 1, column 3: "),
        ("train.steps.x=3", "train.steps.x: must be in a section, but train.steps is 200; override train.steps itself"),
        ("data.source={a: 1, a: 2}", "data.source.a: must be given once, got it on lines 1 and 1; remove one"),
    ],
)
def test_a_malformed_override_is_a_fault_like_any_other(override, fault):
    faults = faults_of(override, "zzz=1")
    assert faults[0].startswith(fault)
    assert sum(found.startswith("zzz: ") for found in faults) == 1


def test_later_overrides_win_and_reach_nested_keys():
    recipe = load_recipe(QUICKSTART, ["train.steps=60", "train.steps=70", "model.config.hidden_size=64"])
    assert (recipe.train.steps, recipe.model.config.hidden_size) == (70, 64)


def test_an_override_fixes_a_fault_of_the_file(tmp_path):
    path = written(tmp_path, QUICKSTART.read_text(encoding="utf-8").replace("steps: 200", "steps: -1"))
    assert load_recipe(path, ["train.steps=30"]).train.steps == 30


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(QUICKSTART).train.steps = 3


def test_the_schema_describes_every_key_and_allows_no_other():
    schema = recipe_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["title"] == "ms_varlen recipe"
    for section in [schema, *schema["$defs"].values()]:
        assert section["additionalProperties"] is False
        assert section["description"]
    own = [("BatchConfig", 6), ("TrainConfig", 13), ("DeviceConfig", 6)]
    for name, keys in own:
        properties = schema["$defs"][name]["properties"]
        assert len(properties) == keys
        assert all(value["description"] for value in properties.values())
    assert schema["$defs"]["TrainConfig"]["properties"]["beta1"]["exclusiveMaximum"] == 1


def test_nesting_too_deep_for_the_parser_is_one_fault(tmp_path):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400 + len(inspect.stack()))  # whatever others have raised it to
    try:
        with pytest.raises(RecipeError, match="must not be nested hundreds of levels deep"):
            load_recipe(written(tmp_path, "x: " + "[" * 5000))
        faults = faults_of("train.seed=" + "[" * 3000)
    finally:
        sys.setrecursionlimit(limit)
    assert faults == ["train.seed: must not be nested hundreds of levels deep; fix the value"]


def test_a_path_with_a_nul_is_refused():
    assert faults_of('checkpoint.output_dir="a\\0b"')[0].startswith("checkpoint.output_dir: must be a path, got ")
