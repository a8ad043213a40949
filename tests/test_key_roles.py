"""The table of recipe keys, and the page made from it."""

import runpy
from pathlib import Path

import pytest

from ms_varlen.faults import key_paths, section_class
from ms_varlen.key_roles import KEY_ROLES, UNKNOWN, Decides, dotted, key_role
from ms_varlen.recipe.recipe import Recipe

ROOT = Path(__file__).parents[1]
SECTIONS = [name for name, field in Recipe.model_fields.items() if section_class(field.annotation)]
KEYS = [path for path in key_paths(Recipe) if path not in SECTIONS]


def entry_of(path):
    return next((entry for entry in KEY_ROLES if path == entry or path.startswith(f"{entry}.")), path)


def test_each_key_of_a_recipe_has_a_role_and_each_entry_is_used():
    assert len(KEYS) > 60
    assert {entry_of(path) for path in KEYS} == set(KEY_ROLES)


@pytest.mark.parametrize(
    ("key", "may_change", "replans", "may_differ"),
    [
        ("train.steps", True, False, False),
        ("data.store_dir", True, False, True),
        ("data.tokenizer", False, False, True),
        ("batch.rows", False, True, False),
        ("model.config.hidden_size", False, False, False),
        ("checkpoint.output_dir", True, False, False),
        ("device.target", False, False, False),
    ],
)
def test_freedom_follows_from_what_a_key_decides(key, may_change, replans, may_differ):
    role = key_role(key)
    assert (role.may_change, role.replans, role.may_differ) == (may_change, replans, may_differ)


def test_a_key_of_another_version_may_not_change():
    assert key_role("train.unheard_of") == UNKNOWN
    assert not UNKNOWN.may_change


def test_a_section_stands_for_the_keys_below_it():
    assert key_role("model.config.rope_scaling.factor") == KEY_ROLES["model.config"]
    assert Decides.PLAN in key_role("shapes.divisor").decides


def test_nested_values_become_dotted_keys():
    assert dict(dotted({"a": {"b": 1, "c": {}}, "d": [2]})) == {"a.b": 1, "a.c": {}, "d": [2]}


def test_the_reference_of_recipe_keys_is_made_from_the_code():
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_reference.py"))
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == script["reference"](), "run python scripts/recipe_reference.py"
