"""Recipe text to plain values: YAML without its surprises, and `section.key=value` overrides.

Plain scalars are read as YAML 1.2 and JSON do: ``1e-3`` is a number, ``off`` and ``yes`` are text, ``010`` is ten.
Tags, aliases and a second document are refused.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from ms_varlen.errors import RecipeError
from ms_varlen.faults import Fault, shown

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_OVERRIDE = re.compile(r"(?P<path>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)=(?P<value>.+)", re.DOTALL)
_OF_MINDFORMERS = re.compile(r"^(runner_config|train_dataset):", re.MULTILINE)


class _Loader(yaml.BaseLoader):
    """Composes nodes only. Aliases, which allow endless values, and tags are refused: no recipe needs them."""

    def compose_node(self, parent, index):
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.tag is not None:
            problem = "aliases (*name) and tags (!name) are not allowed"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def read_recipe_file(path: str | Path) -> tuple[dict[str, Any], list[Fault]]:
    """The mapping in a YAML file, and the faults that leave the rest readable (duplicate keys).

    Raises:
        RecipeError: the file is missing, unreadable, empty, no YAML or no mapping; YAML faults come with their line.
    """
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if _OF_MINDFORMERS.search(text):
            raise RecipeError(
                [
                    "file: must be a recipe of ms_varlen, got a YAML of MindFormers; run it with "
                    f"python -m ms_varlen.bridge.run {where}"
                ],
                where,
            )
        node = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        raise RecipeError(
            [f"file: must be readable, got {error.strerror!r}; check the path of the recipe"], where
        ) from None
    except UnicodeDecodeError as error:
        fault = (
            f"file: must be UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}; save it as UTF-8"
        )
        raise RecipeError([fault], where) from None
    except yaml.YAMLError as error:
        raise RecipeError([f"{_place(error)}; fix the YAML there"], where) from None
    except RecursionError:
        raise RecipeError(["file: must not be nested hundreds of levels deep; fix the YAML"], where) from None
    if not isinstance(node, yaml.MappingNode):
        found = "an empty file" if node is None else f"line {node.start_mark.line + 1}: {shown(_plain(node, '', []))}"
        raise RecipeError([f"file: must hold a mapping of sections, got {found}; start with mode: varlen"], where)
    faults: list[Fault] = []
    return _plain(node, "", faults), faults


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> list[Fault]:
    """Set `section.key=value` overrides in `data`, in their order; the values are YAML.

    Returns:
        the faults of overrides that were not applied, and of the values of those that were.
    """
    faults: list[Fault] = []
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            text = "must be section.key=value, such as train.steps=100 (null unsets a value)"
            faults.append(Fault("override", f"{text}, got {override!r}; rewrite it"))
            continue
        path = match["path"]
        try:
            node = yaml.compose(match["value"], Loader=_Loader)
        except yaml.YAMLError as error:
            faults.append(
                Fault(path, f"must be given a YAML value, got {override!r} ({_place(error)}); quote the value")
            )
            continue
        except RecursionError:
            faults.append(Fault(path, "must not be nested hundreds of levels deep; fix the value"))
            continue
        value = None if node is None else _plain(node, path, faults)
        faults.extend(_set(data, path.split("."), value))
    return faults


def _set(data: dict[str, Any], parts: list[str], value: Any) -> list[Fault]:
    *sections, key = parts
    for depth, name in enumerate(sections, start=1):
        if data.get(name) is None:
            data[name] = {}
        if not isinstance(data[name], dict):
            section = ".".join(parts[:depth])
            text = f"must be in a section, but {section} is {shown(data[name])}; override {section} itself"
            return [Fault(".".join(parts), text)]
        data = data[name]
    data[key] = value
    return []


def _plain(node: yaml.Node, path: str, faults: list[Fault]) -> Any:
    """A node as dict, list or scalar; duplicate keys are added to `faults`."""
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, faults)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{path}[{i}]", faults) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.ScalarNode), "YAML has three kinds of nodes"
    return _scalar(node.value) if node.style is None else node.value


def _mapping(node: yaml.MappingNode, path: str, faults: list[Fault]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else shown(_plain(key_node, path, faults))
        below = f"{path}.{key}" if path else key
        line = key_node.start_mark.line + 1
        if key in result:
            faults.append(Fault(below, f"must be given once, got it on lines {lines[key]} and {line}; remove one"))
        result[key] = _plain(value_node, below, faults)
        lines[key] = line
    return result


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _place(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
