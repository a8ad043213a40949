import subprocess
import sys

import pytest
import yaml

from ms_varlen.bridge.checks import config_faults
from ms_varlen.bridge.recipes import Devices, mindformers_config, mindformers_yaml, write_mindformers_recipe
from ms_varlen.bridge.run import check_file
from ms_varlen.errors import RecipeError
from ms_varlen.recipe.recipe import load_recipe
from tests.support.bridge_cases import NO_EVALUATION, READY, ROOT, ready_config

QWEN3 = "model.config.architecture=qwen3"
SCALING = "model.config.rope_scaling={rope_type: linear, factor: 2.0}"


@pytest.mark.parametrize("name", sorted(READY))
def test_the_ready_recipes_are_what_the_command_makes_and_pass_the_checks(name):
    path = ROOT / "recipes" / "mindformers" / name
    assert mindformers_yaml(ready_config(name)) == path.read_text()
    assert check_file(path) == ("CPU" if name == "qwen3_cpu.yaml" else "Ascend")


def test_every_file_of_the_folder_is_known():
    assert {path.name for path in (ROOT / "recipes" / "mindformers").iterdir()} == set(READY)


def test_a_made_file_is_overwritten_only_by_force(tmp_path):
    recipe = load_recipe(ROOT / "recipes" / "packed.yaml", NO_EVALUATION)
    text = write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml")
    (tmp_path / "made.yaml").write_text("filled in by hand")
    with pytest.raises(RecipeError, match=r"--output: must be a new file, .* exists already; .* with --force"):
        write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml")
    assert (tmp_path / "made.yaml").read_text() == "filled in by hand"
    write_mindformers_recipe(recipe, "llama", Devices(), tmp_path / "made.yaml", force=True)
    assert (tmp_path / "made.yaml").read_text() == text


@pytest.mark.parametrize(
    ("recipe", "family", "devices", "overrides", "message"),
    [
        ("bucketed.yaml", "llama", Devices(), [], "mode: must be packed, varlen or padded, got bucketed"),
        ("packed.yaml", "qwen3", Devices(), [], "architecture: must be qwen3 for MindFormers' qwen3, got llama"),
        ("packed.yaml", "llama", Devices(pipeline_stage=2), [], "batch.micro_batches: must be >= the pipeline stages"),
        ("packed.yaml", "llama", Devices(model_parallel=8), [], "model_parallel: must divide num_key_value_heads"),
        ("packed.yaml", "llama", Devices(), ["device.target=CPU"], "must be padded for the legacy Llama on a CPU"),
        ("packed.yaml", "qwen3", Devices(), [QWEN3, SCALING], "rope_scaling: must be null for MindFormers' qwen3"),
    ],
)
def test_what_mindformers_models_lack_is_refused(recipe, family, devices, overrides, message):
    with pytest.raises(RecipeError, match=message):
        mindformers_config(load_recipe(ROOT / "recipes" / recipe, overrides), family, devices)


def test_weights_to_begin_from_are_refused_with_the_command_that_makes_mindformers_own():
    recipe = load_recipe(ROOT / "recipes" / "packed.yaml", NO_EVALUATION)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"init_from": "hf"})})
    with pytest.raises(RecipeError, match=r"model.init_from: must be null, got hf: .* ckpt-tools export-mindformers"):
        mindformers_config(recipe, "llama", Devices())


def test_scaled_rotary_angles_of_the_legacy_llama_are_in_its_yaml():
    recipe = load_recipe(ROOT / "recipes" / "packed.yaml", [SCALING, "device.target=Ascend", *NO_EVALUATION])
    model = mindformers_config(recipe, "llama", Devices())["model"]["model_config"]
    assert (model["extend_method"], model["scaling_factor"]) == ("LINEAR", {"factor": 2.0})


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
    if module.name == "ms_varlen.diagnose.bench.torch_peer":  # takes 10 s, needs torch
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed.append((module.name, error.name.split(".")[0]))
    except ms_varlen.errors.VarlenError as error:
        failed.append((module.name, str(error)))
from ms_varlen.bridge.run import main
from ms_varlen.cli.app import main as command
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
        "ms_varlen.diagnose.bench.mindformers_peer",
    }
    assert advice in causes["ms_varlen.bridge.register"]
    assert config_faults(yaml.safe_load((tmp_path / "made.yaml").read_text())) == []
