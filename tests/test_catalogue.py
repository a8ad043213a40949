"""The catalogue and the codes that checks and errors carry."""

import re
from pathlib import Path

import pytest

import ms_varlen
from ms_varlen.catalogue import LANGUAGES, catalogue, explain
from ms_varlen.errors import RecipeError

SOURCES = [path for path in Path(ms_varlen.__file__).parent.rglob("*.py") if path.name != "catalogue.py"]
SOURCES.append(Path(__file__).parent / "support" / "flash_attention.py")  # stands for the device
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)


def test_both_languages_have_the_same_codes_and_no_empty_text():
    english, chinese = (catalogue(language) for language in LANGUAGES)
    assert list(english) == list(chinese)
    assert all(all(vars(entry).values()) for entries in (english, chinese) for entry in entries.values())
    assert all(re.search("[一-鿿]", entry.title) for entry in chinese.values())


def test_every_code_in_the_program_has_an_entry_and_every_entry_is_used():
    prefixes = sorted({code.split("-")[0] for code in catalogue() if "-" in code})
    used = set(re.findall(rf'["\[]((?:{"|".join(prefixes)})-[A-Z]+)["\]]', TEXT)) | {"RECIPE"}
    assert used == set(catalogue())


def test_explain_takes_any_case():
    assert explain("len-zero") == catalogue()["LEN-ZERO"]
    assert explain("LEN-ZERO", "zh").title == "长度为零或负数"


def test_explain_refuses_an_unknown_code():
    with pytest.raises(RecipeError, match="must be a code of the catalogue, got NOTHING"):
        explain("NOTHING")
