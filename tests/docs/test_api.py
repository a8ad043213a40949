"""The public API: each name imports, is documented, and nothing else is public."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ms_varlen

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/library.md").read_text(encoding="utf-8")
NAMES = ms_varlen.__all__


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_imports(name):
    assert getattr(ms_varlen, name).__module__ == ms_varlen._HOME[name]


def test_the_page_describes_each_public_name_and_no_other():
    table = PAGE.split("## Names")[1]
    assert re.findall(r"^\| `(\w+)` \| \S", table, re.MULTILINE) == NAMES


def test_the_page_names_what_starts_mindspore():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", PAGE, re.MULTILINE)
    light = [name for name, starts in rows if starts == "no"]
    code = (
        f"import sys, ms_varlen\nfor name in {light}: getattr(ms_varlen, name)\nassert 'mindspore' not in sys.modules"
    )
    assert light
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(ms_varlen.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == ms_varlen._HOME


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ms_varlen' has no attribute 'Laout'"):
        _ = ms_varlen.Laout


def test_the_short_example_runs():
    examples = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    exec(compile(examples[1], "library.md", "exec"), {})
