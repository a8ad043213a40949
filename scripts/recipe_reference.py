"""Write docs/recipe.md, the reference of recipe keys: ``python scripts/recipe_reference.py``.

Type, bounds, default and meaning come from the pydantic models, the rest from `ms_varlen.key_roles`.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ms_varlen.faults import BROUGHT_NAMES, allowed_values, section_class
from ms_varlen.key_roles import Decides, KeyRole, key_role
from ms_varlen.recipe.recipe import Recipe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipe.md"

INTRO = """# Recipe

<!-- Made by scripts/recipe_reference.py; edit the descriptions in the code. -->

A recipe is a YAML file with `mode` and eight sections, of which `data`, `model`, `train` and `checkpoint` are required.
Start from a file in `recipes/`. Plain values are read as in YAML 1.2: `1e-3` is a number, `off` is text. Any key can be
set on the command line as `section.key=value`, after the recipe's path. All faults of a recipe are reported at once.

`decides` says what a key has an effect on: the samples of the token *store*, the *plan*, the compiled *graphs*, the
*numbers* (losses and weights), a place on one *node*, or nothing of these. `on resume` says whether the key may change
when a run resumes: *free*; *replans* (the rest of the epoch is planned again); *same content* (the path may change, its
content may not); *fixed* (a change is refused by name). Ranks of one run must agree on every key except those that
decide only a place on a node and those compared by content."""

NOTES = {
    "mode": "See [Modes and shapes](modes-and-shapes.md). `ckpt-tools convert` takes a run to another mode.",
    "data": "See [Data](data.md).",
    "batch": "See [Modes and shapes](modes-and-shapes.md). The allowed keys depend on the mode.",
    "shapes": "See [Modes and shapes](modes-and-shapes.md).",
    "model": "See [Models](models.md).",
    "model.config": "The names are those of a Hugging Face `config.json`; the key may also be the path of one.",
    "train": "See [Training](training.md).",
    "graph": "See [Graphs](modes-and-shapes.md#graphs).",
    "checkpoint": "See [Checkpoints](checkpoints.md).",
    "device": "See [On Ascend](ascend.md).",
}

NAMES = {Decides.NODE: "node", Decides.DATA: "store", Decides.PLAN: "plan", Decides.GRAPH: "graphs"}
NAMES |= {Decides.NUMBERS: "numbers"}


def on_resume(role: KeyRole) -> str:
    """Return whether a key may change on resume, in one word or two."""
    if role.may_change:
        return "free"
    return "replans" if role.replans else "same content" if role.by_content else "fixed"


def default_of(field: Any) -> str:
    """Return the default of a field as YAML shows it."""
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is PydanticUndefined:
        return "derived"
    value = field.default
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value}"


def tables(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the tables of a section and of the sections below it, as Markdown."""
    rows, below = [], []
    schema = Recipe.model_json_schema()
    for name, field in section.model_fields.items():
        path = prefix + name
        inner = section_class(field.annotation)
        if inner is not None and field.default is not None:
            below += tables(inner, f"{path}.")
            continue
        role = key_role(path)
        decides = ", ".join(text for flag, text in NAMES.items() if flag in role.decides) or "–"
        meaning = (field.description or "").replace("|", "\\|").replace("<output_dir>", "`<output_dir>`")
        cells = (f"`{path}`", allowed_values(path, schema), default_of(field), decides, on_resume(role), meaning)
        rows.append(f"| {' | '.join(cells)} |")
    head = "| key | allowed | default | decides | on resume | meaning |\n|---|---|---|---|---|---|"
    title = prefix.rstrip(".")
    note = [NOTES[title]] if title in NOTES else []
    return ["\n\n".join([f"## {title or 'mode'}", *note, "\n".join([head, *rows])]), *below]


def brought_names() -> str:
    """Return the table of names from other frameworks, as Markdown."""
    rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, meant in BROUGHT_NAMES.items():
        rows.setdefault(meant, []).append(f"`{name}`")
    lines = [
        f"| {', '.join(names)} | {', '.join(f'`{key}`' for key in keys) or 'none'}{f' ({note})' if note else ''} |"
        for (keys, note), names in rows.items()
    ]
    head = "An unknown key is refused; for these names the message gives ours.\n\n| other name | here |\n|---|---|"
    return "## Names from other frameworks\n\n" + "\n".join([head, *lines])


def reference() -> str:
    """Return the whole page."""
    return "\n\n".join([INTRO, *tables(Recipe), brought_names()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
