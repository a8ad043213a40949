"""What an alignment leaves behind, so that others can tell whether a recipe has passed one. Imports no MindSpore."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ms_varlen.files import write_atomically
from ms_varlen.key_roles import dotted, key_role
from ms_varlen.recipe.recipe import Recipe

ALIGN_FILE = "align.json"


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256 of all keys of a recipe that decide its numbers; folders, saving and the number of steps do not."""
    deciding = {key: value for key, value in dotted(recipe.resolved()) if not key_role(key).may_change}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def save_alignment(recipe: Recipe, result: Mapping[str, Any]) -> Path:
    """Write the result of `align` to ``<output_dir>/align.json``, passed or not; its path."""
    keys = ("passed", "steps", "max_abs_diff", "tolerance", "gradient_max_rel_diff", "versions")
    path = recipe.checkpoint.output_dir / ALIGN_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"recipe_sha256": recipe_hash(recipe), **{key: result[key] for key in keys}}
    write_atomically(path, [json.dumps(saved, indent=1).encode()])
    return path


def alignment_warning(recipe: Recipe, versions: Mapping[str, str]) -> str | None:
    """Why this recipe's numbers are not known to be right; None when it has passed `align`.

    Args:
        recipe: the recipe.
        versions: of what is running now, the attention body among them.
    """
    advice = "run ms-varlen align on this recipe first, since a fast wrong result is worth nothing"
    path = recipe.checkpoint.output_dir / ALIGN_FILE
    if not path.is_file():
        return f"this recipe has not passed align: there is no {path}; {advice}"
    saved = json.loads(path.read_bytes())
    if saved["recipe_sha256"] != recipe_hash(recipe):
        return f"this recipe has not passed align: {path} is of other settings; {advice}"
    if not saved["passed"]:
        return f"this recipe has FAILED align ({path}); mend that first"
    changed = [name for name in sorted(versions) if saved["versions"].get(name) != versions[name]]
    if changed:
        return f"this recipe passed align with another {', '.join(changed)} ({path}); {advice}"
    return None
