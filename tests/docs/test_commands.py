"""Every command line in README and docs/ parses against the real command line; short ones are run.

Commands stand in blocks that are fenced as bash; other blocks show output.
"""

import argparse
import importlib
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer

from ms_varlen.errors import RecipeError
from ms_varlen.faults import key_paths
from ms_varlen.recipe.recipe import Recipe, load_recipe
from tests.support.cli_run import ms_varlen

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=.*")
APPS = {"ms-varlen": "ms_varlen.cli.app", "ckpt-tools": "ckpt_tools.cli"}
OTHERS = {"pip", "source", "export", "mindspore"}
"""Programs of others, and of the shell, that a page may show; nothing checks their arguments."""

PLACEHOLDERS = {"RECIPE", "RUN", "SRC", "DST", "PATH"}
SHORT = [("plan",), ("schema",), ("doctor", "--list"), ("doctor", "--explain"), ("lint-batches", "--how")]
SHORT += [(command, source) for command in ("stats", "data") for source in ("pydoc", "my.jsonl")]
"""How commands begin that take a second or two."""


def commands(page):
    """Words of each command in the bash blocks of a page, without variables, redirections and comments."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            if "$(" in line:  # nested commands are not split here
                continue
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if ">" in words:
                words = words[: words.index(">")]
            if words:
                yield words


SHOWN = [pytest.param(words, id=f"{page.name}-{' '.join(words)}") for page in PAGES for words in commands(page)]


def known_key(key):
    paths = set(key_paths(Recipe))
    return key in paths or key.startswith("model.config.")


def check_recipe(words, folder):
    """The overrides of a command: known keys, and with the recipe of this project a valid recipe."""
    overrides = [word for word in words if OVERRIDE.fullmatch(word)]
    for override in overrides:
        assert known_key(override.partition("=")[0]), override
    for override in overrides:  # what a reader has and this folder has not
        key, _, value = override.partition("=")
        if key in ("data.source", "data.tokenizer", "checkpoint.resume") and value not in ("pydoc", "bytes", "never"):
            path = folder / value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch() if path.suffix else path.mkdir(exist_ok=True)
    recipes = [word for word in words if word.startswith("recipes/") and (ROOT / word).suffix == ".yaml"]
    for recipe in recipes:
        if "mindformers" not in recipe and "smollm2" not in recipe:  # a recipe of MindFormers; weights to download
            load_recipe(ROOT / recipe, overrides)


def parse_typer(program, arguments):
    """Parse as the program does, and call nothing."""
    group = typer.main.get_command(importlib.import_module(APPS[program]).app)
    with group.make_context(program, list(arguments), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        with command.make_context(name, rest, parent=context):
            pass


class Parsed(Exception):
    """A script has parsed its arguments."""


def parse_script(run, arguments, monkeypatch):
    """Run a script until it has parsed its arguments."""
    original = argparse.ArgumentParser.parse_args

    def parse(parser, args=None, namespace=None):
        original(parser, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", list(arguments))
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "measure"), *sys.path])
    with pytest.raises(Parsed):
        run()


@pytest.mark.parametrize("words", SHOWN)
def test_a_command_is_understood(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    program, *arguments = words
    if program in APPS:
        parse_typer(program, arguments)
        check_recipe(arguments, tmp_path)
    elif program == "msrun":
        place = arguments.index("scripts/train.py")
        parse_typer("ms-varlen", ["train", *arguments[place + 1 :]])
        check_recipe(arguments[place + 1 :], tmp_path)
    elif program in ("bash", "python") and arguments[0].startswith("scripts/"):
        script, *rest = arguments
        assert (ROOT / script).is_file()
        if script == "scripts/msrun_launch.sh":
            launch = importlib.import_module("ms_varlen.launch.__main__")
            given = rest[: rest.index("--")] if "--" in rest else rest
            parse_script(lambda: launch.main(given), [script, *given], monkeypatch)
        if program == "python":
            parse_script(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), [script, *rest], monkeypatch)
        check_recipe((["recipes/quickstart.yaml"] if script == "scripts/run.sh" else []) + rest, tmp_path)
    elif words[:3] == ["python", "-m", "ms_varlen.bridge.run"]:
        assert words[3].endswith(".yaml")
    else:
        assert program in OTHERS, words


def test_commands_are_found_and_faults_are_seen(tmp_path):
    assert len(SHOWN) > 50
    with pytest.raises(Exception, match="--wold-size"):
        parse_typer("ms-varlen", ["plan", "recipes/quickstart.yaml", "--wold-size", "8"])
    with pytest.raises(AssertionError, match=r"train\.step=20"):
        check_recipe(["recipes/quickstart.yaml", "train.step=20"], tmp_path)
    with pytest.raises(RecipeError, match="token_budget"):
        check_recipe(["recipes/quickstart.yaml", "batch.token_budget=100"], tmp_path)


def is_short(words):
    arguments = tuple(words[1:])
    readers = any(word.startswith("models/") or word in PLACEHOLDERS for word in words)
    return words[0] == "ms-varlen" and not readers and any(arguments[: len(short)] == short for short in SHORT)


RUN = {" ".join(param.values[0]): param.values[0] for param in SHOWN if is_short(param.values[0])}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def reader(tmp_path, monkeypatch, cache):
    """A folder as a reader has it, with the file that the README speaks of; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    lines = [json.dumps({"text": "word " * (number % 90 + 1)}) for number in range(1500)]
    (tmp_path / "my.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", [pytest.param(words, id=text) for text, words in RUN.items()])
def test_a_short_command_runs(words, reader, capsys):
    from ms_varlen.cli.app import main

    assert main(words[1:]) == 0, capsys.readouterr().err


@pytest.mark.graph
def test_a_file_of_ones_own_becomes_a_report(reader, cache):
    (block,) = re.findall(r"<!-- own file -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [words[:2] for words in lines] == [["ms-varlen", name] for name in ("data", "plan", "train")]
    small = [
        "train.steps=2",
        "train.eval_every=null",
        "model.config.hidden_size=32",
        "model.config.num_hidden_layers=1",
    ]
    done = ms_varlen(cache, *lines[-1][1:], *small)
    assert done.returncode == 0, done.stderr
    written = {path.name for path in (reader / "output" / "mine" / "varlen").iterdir()}
    assert written >= {"report.html", "metrics.jsonl", "plan.json", "recipe.yaml", "step_00000002"}
