"""The recipe of a run: one YAML file, with all of its faults reported at once.

recipe = load_recipe("recipes/quickstart.yaml", ["train.steps=60", "shapes.kind=static"])
"""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from ms_varlen.checkpoint.config import CheckpointConfig
from ms_varlen.data.config import DataConfig
from ms_varlen.errors import RecipeError
from ms_varlen.faults import Fault, field_faults, key_paths, section_class, unknown_key
from ms_varlen.graph.config import GraphConfig, ShapesConfig
from ms_varlen.models.config import ModelConfig
from ms_varlen.models.hugging_face import read_hugging_face
from ms_varlen.modes import Mode, ModeKey
from ms_varlen.planning.config import BatchConfig
from ms_varlen.recipe.rules import rule_faults
from ms_varlen.recipe.sections import DeviceConfig, TrainConfig
from ms_varlen.recipe.sizes import Sizes
from ms_varlen.recipe.yaml_text import apply_overrides, read_recipe_file


class Recipe(BaseModel):
    """Everything that decides one run. Make one with `load_recipe` or `parse_recipe`."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="ms_varlen recipe")

    mode: ModeKey = Field(
        default=Mode.VARLEN,
        description="padded: a row for each sequence, padded at the right and attended to as a whole (the baseline); "
        "bucketed: rows of similar length, attention counts real tokens; packed: sequences one after another, chosen "
        "so that micro-batches are full; varlen: sequences one after another in shuffled order",
    )
    data: DataConfig
    batch: BatchConfig = Field(default_factory=BatchConfig)
    shapes: ShapesConfig = Field(default_factory=ShapesConfig)
    model: ModelConfig
    train: TrainConfig
    graph: GraphConfig = Field(default_factory=GraphConfig)
    checkpoint: CheckpointConfig
    device: DeviceConfig = Field(default_factory=DeviceConfig)

    @property
    def sizes(self) -> Sizes:
        """The keys that size micro-batches, gathered from their sections."""
        return Sizes(
            mode=self.mode,
            seq_length=self.model.seq_length,
            **self.batch.model_dump(exclude={"micro_batches"}),
            **self.shapes.model_dump(),
        )

    def resolved(self) -> dict[str, Any]:
        """Plain nested values with every default filled in: what ``recipe.yaml`` holds and fingerprints are made of.

        `parse_recipe` makes an equal recipe from it.
        """
        return self.model_dump(mode="json")


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe in a YAML file, with ``section.key=value`` overrides.

    Args:
        path: the YAML file.
        overrides: each a YAML path, ``=`` and a YAML value; later ones win.
    Raises:
        RecipeError: anything wrong with the file, the overrides or the recipe; all faults at once.
    """
    data, faults = read_recipe_file(path)
    faults += apply_overrides(data, overrides)
    return parse_recipe(data, where=str(path), faults=faults)


def parse_recipe(data: dict[str, Any], where: str = "recipe", faults: Iterable[Fault] = ()) -> Recipe:
    """The recipe in plain nested values.

    Args:
        data: sections and their keys, as YAML or `Recipe.resolved` gives them.
        where: what to call the recipe in an error.
        faults: faults that were found while reading; their keys are checked no further.
    Raises:
        RecipeError: one line for each fault.
    """
    data = copy.deepcopy(data)
    found = list(faults)
    doubtful = {fault.path for fault in found}
    for fault in _read_model_config(data):
        found.append(fault)
        doubtful.add("model.config")
    for path in doubtful:
        _drop(data, path.split("."))
    for fault, meant in _take_unknown_keys(data):
        found.append(fault)
        doubtful.update(path for path in meant if path.rpartition(".")[2] not in _holder(data, path.split(".")))
    recipe, wrong = _validate(data)
    found += [fault for fault in wrong if not _within(fault.path, doubtful)]
    doubtful.update(fault.path.partition("[")[0] for fault in wrong)  # a list with a wrong entry is wrong
    found += rule_faults(_valid_values(Recipe, data, "", doubtful))
    if found or recipe is None:
        raise RecipeError([str(fault) for fault in found], where)
    return recipe


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors: each key's type, bounds, default and description."""
    schema = Recipe.model_json_schema()
    config = schema["$defs"]["ModelConfig"]["properties"]["config"]
    config["anyOf"] = [{"$ref": config.pop("$ref")}, {"type": "string"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _read_model_config(data: dict[str, Any]) -> list[Fault]:
    """Put the fields of the `config.json` that `model.config` names in its place, so that the recipe holds them all."""
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("config"), str):
        return []
    path = model["config"]
    model["config"], faults = read_hugging_face(path)
    return [
        Fault(f"model.config.{key}", f"{text} (in {path})") if key else Fault("model.config", text)
        for key, text in faults
    ]


def _validate(data: dict[str, Any]) -> tuple[Recipe | None, list[Fault]]:
    # As JSON, because strict checking (true is not 1, "8" is not 8) still reads paths from text there.
    try:
        return Recipe.model_validate_json(json.dumps(data), strict=True), []
    except ValidationError as error:
        return None, field_faults(error, Recipe)


def _take_unknown_keys(data: dict[str, Any]) -> list[tuple[Fault, tuple[str, ...]]]:
    """Remove unknown keys from `data`: their faults, and the keys that were probably meant."""
    try:
        Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        known = list(key_paths(Recipe))
        unknown = [details for details in error.errors() if details["type"] == "extra_forbidden"]
        for details in unknown:
            _drop(data, _parts(details))
        return [unknown_key(_parts(details), details["input"], known) for details in unknown]
    return []


def _valid_values(section: type[BaseModel], data: dict[str, Any], prefix: str, doubtful: set[str]) -> dict[str, Any]:
    """By path, the values that are valid by themselves, defaults filled in, and each as written under ``path?``."""
    values: dict[str, Any] = {}
    here: dict[str, Any] = {}
    for position, (name, field) in enumerate(section.model_fields.items()):
        path = prefix + name
        inner = section_class(field.annotation)
        if path in doubtful and not (inner and isinstance(data.get(name), dict)):
            continue
        if inner is not None and not (field.default is None and data.get(name) is None):
            below = data.get(name, {})
            values |= _valid_values(inner, below, f"{path}.", doubtful)
            if not any(_within(wrong, {path}) for wrong in doubtful):
                values[path] = inner.model_validate(below)
            continue
        if name in data:
            values[path] = here[name] = data[name]
        elif len(here) == position or not field.default_factory_takes_validated_data:
            values[path] = here[name] = field.get_default(call_default_factory=True, validated_data=here)
        values[f"{path}?"] = data.get(name)
    return values


def _parts(details: ErrorDetails) -> list[str]:
    return [str(name) for name in details["loc"]]


def _holder(data: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """The mapping that holds the key at a path, empty if there is none."""
    for name in parts[:-1]:
        data = data[name] if isinstance(data.get(name), dict) else {}
    return data


def _drop(data: dict[str, Any], parts: list[str]) -> None:
    _holder(data, parts).pop(parts[-1], None)


def _within(path: str, places: set[str]) -> bool:
    """Whether a path is one of the places or below one."""
    return any(path == place or path.startswith(f"{place}") for place in places)
