"""The catalogue of faults: one code for each, with symptom, check, cause and remedy, in English and Chinese.

Codes are shared by run-time errors, the doctor, align and lint-batches, and explained by
``ms-varlen doctor --explain CODE``. The texts lie in ``catalogue.yaml``.
"""

import dataclasses
import functools
from pathlib import Path

import yaml

from ms_varlen.errors import RecipeError

LANGUAGES = ("en", "zh")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One fault in one language.

    Attributes:
        code: its name; part of the interface.
        title: what is wrong.
        symptom: what a user sees.
        check: where to look.
        cause: how it comes about.
        remedy: what to do.
    """

    code: str
    title: str
    symptom: str
    check: str
    cause: str
    remedy: str


@functools.cache
def catalogue(language: str = "en") -> dict[str, Entry]:
    """Code -> entry, in the order of the file."""
    texts = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {code: Entry(code, **entry[language]) for code, entry in texts.items()}


def explain(code: str, language: str = "en") -> Entry:
    """The entry of a code, in whatever case it is written.

    Raises:
        RecipeError: no such code.
    """
    entries = catalogue(language)
    entry = entries.get(code.upper())
    if entry is None:
        raise RecipeError(
            [f"--explain: must be a code of the catalogue, got {code}; `doctor --list` prints all"], "doctor"
        )
    return entry
