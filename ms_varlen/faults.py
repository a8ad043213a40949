"""Faults of single keys, from pydantic's errors: YAML path, allowed values and nearest key."""

import dataclasses
import difflib
import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a recipe.

    Attributes:
        path: YAML path of the key, such as "train.steps".
        text: the rule, the value found and the next step.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def shown(value: Any) -> str:
    """A value as JSON (and YAML) writes it on one line, cut to 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SIZES = ("shapes.kind", "shapes.min", "shapes.max", "shapes.divisor")
_LENGTH = ("model.seq_length", "model.max_position_embeddings")
_BATCH = ("batch.token_budget", "batch.rows")
_CARRIED = "the data set carries lengths to attention by itself; model.variable_seq_lengths switches that"

BROUGHT_NAMES: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("length_buckets", "bucket_boundaries", "buckets"), (("shapes.kind", "shapes.row_buckets"), "")),
    **dict.fromkeys(("dynamic_shape_config", "set_dynamic_shape", "dynamic_shape", "dynamic_batch"), (_SIZES, "")),
    **dict.fromkeys(("actual_seq_lengths", "actual_seq_length", "actual_seq_len"), ((), _CARRIED)),
    **dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen", "seq_lens", "cu_seqlens"), ((), _CARRIED)),
    **dict.fromkeys(("max_seq_len", "max_seq_length", "max_length", "seq_len", "block_size"), (_LENGTH, "")),
    **dict.fromkeys(("batch_size", "micro_batch_size", "per_device_train_batch_size"), (_BATCH, "")),
    **dict.fromkeys(("gradient_accumulation_steps", "micro_batch_num"), (("batch.micro_batches",), "")),
    **dict.fromkeys(("max_tokens", "tokens_per_batch"), (("batch.token_budget",), "")),
    **dict.fromkeys(("lr", "base_lr", "max_lr"), (("train.learning_rate",), "")),
    "min_lr": (("train.min_lr_ratio",), "a share of the peak"),
    **dict.fromkeys(("lr_schedule", "lr_scheduler_type"), (("train.schedule",), "")),
    **dict.fromkeys(("num_epochs", "epochs", "num_train_epochs"), (("train.steps",), "optimizer steps, not epochs")),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps"), (("train.steps",), "")),
    **dict.fromkeys(("warmup", "num_warmup_steps", "warmup_ratio"), (("train.warmup_steps",), "a number of steps")),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip_grad"), (("train.clip_grad_norm",), "")),
    **dict.fromkeys(("betas", "adam_betas"), (("train.beta1", "train.beta2"), "")),
    "eval_steps": (("train.eval_every",), ""),
    **dict.fromkeys(("save_steps", "save_checkpoint_steps", "save_interval"), (("checkpoint.every",), "")),
    **dict.fromkeys(("keep_checkpoint_max", "save_total_limit"), (("checkpoint.keep",), "")),
    **dict.fromkeys(("output", "save_dir"), (("checkpoint.output_dir",), "")),
    **dict.fromkeys(("load_checkpoint", "resume_training", "resume_from_checkpoint"), (("checkpoint.resume",), "")),
    **dict.fromkeys(("dataset", "dataset_dir", "data_path", "train_file"), (("data.source",), "")),
    **dict.fromkeys(("device_target", "device_id"), (("device.target",), "")),
    "max_device_memory": (("device.max_memory",), ""),
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), (("model.config.num_hidden_layers",), "")),
    **dict.fromkeys(("num_heads", "n_heads", "n_head"), (("model.config.num_attention_heads",), "")),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads", "num_query_groups"), (("model.config.num_key_value_heads",), "")),
    **dict.fromkeys(("d_model", "n_embd"), (("model.config.hidden_size",), "")),
    **dict.fromkeys(("ffn_hidden_size", "ffn_dim"), (("model.config.intermediate_size",), "")),
}
"""Names from other frameworks, each with our keys and a word on the difference."""


def section_class(annotation: Any) -> type[BaseModel] | None:
    """The section model that a field holds, or None for a plain value."""
    options = (annotation, *get_args(annotation))
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def key_paths(recipe: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every path that a recipe may have, sections before their keys."""
    for name, field in recipe.model_fields.items():
        yield prefix + name
        section = section_class(field.annotation)
        if section is not None:
            yield from key_paths(section, f"{prefix}{name}.")


def unknown_key(parts: list[str], value: Any, known: list[str]) -> tuple[Fault, tuple[str, ...]]:
    """The fault of an unknown key, and the keys that were probably meant.

    Args:
        parts: the names on its YAML path.
        value: what it is set to.
        known: every path that a recipe may have.
    """
    *sections, key = parts
    section = ".".join(sections)
    if "." in key:
        text = f"must be nested in its section, got {shown(value)}; write a.b as a: {{b: ...}}"
        return Fault(".".join([*sections, f'"{key}"']), text), (key,)
    siblings = [other for other in known if other.rpartition(".")[0] == section]
    brought, note = BROUGHT_NAMES.get(key.lower(), ((), ""))
    meant = tuple(other for other in brought if other in known) or _nearest(key, siblings) or _nearest(key, known)
    if note and not brought:
        meant, advice = (), f"remove it: {note}"
    elif meant:
        advice = f"use {_either(meant, 'and')}" + (f" ({note})" if note else "")
    else:
        advice = "remove it"
    allowed = ", ".join(other.rpartition(".")[2] for other in siblings)
    return Fault(".".join(parts), f"must be a known key, got {shown(value)}; {advice}; allowed here: {allowed}"), meant


def field_faults(error: ValidationError, recipe: type[BaseModel]) -> list[Fault]:
    """One fault for each key that pydantic refused, unknown keys left out."""
    schema = recipe.model_json_schema()
    known = set(key_paths(recipe))
    faults: dict[str, Fault] = {}
    for details in error.errors(include_url=False):
        if details["type"] in ("extra_forbidden", "default_factory_not_called"):
            continue
        path, entry = _error_place(details["loc"], recipe)
        if details["type"] == "value_error":
            fault = _own_fault(path, str(details["ctx"]["error"]), known)
        else:
            fault = Fault(path + entry, _text(details, _field_schema(schema, path), schema, bool(entry)))
        # Of a list with a wrong entry, the other types that its key may have say something too.
        key = fault.path.removesuffix(entry)
        if key not in faults or (entry and faults[key].path == key):
            faults[key] = fault
    return list(faults.values())


def _own_fault(path: str, message: str, known: set[str]) -> Fault:
    """The fault of a section's own validator, whose message starts with the name of the key."""
    name, _, rest = message.partition(" ")
    for place in (path, f"{path}.{name}"):
        if place in known and place.rpartition(".")[2] == name:
            return Fault(place, rest)
    return Fault(path, message)


def _error_place(loc: tuple[int | str, ...], recipe: type[BaseModel]) -> tuple[str, str]:
    """The YAML path of an error, without the names of union members that pydantic adds; and ``[i]`` in a list."""
    parts: list[str] = []
    section: type[BaseModel] | None = recipe
    for part in loc:
        if section is None:
            break
        parts.append(str(part))
        field = section.model_fields.get(str(part))
        section = section_class(field.annotation) if field else None
    return ".".join(parts), f"[{loc[-1]}]" if loc and isinstance(loc[-1], int) else ""


def _text(details: ErrorDetails, field: dict[str, Any], root: dict[str, Any], in_list: bool) -> str:
    means = f" ({field['description'].split('. ')[0].rstrip('.')})" if "description" in field else ""
    options = [option for option in field.get("anyOf", [field]) if "items" in option] if in_list else []
    allowed = f"must be {_allowed(options[0]['items'] if options else field, root)}"
    if details["type"] == "missing":
        return f"{allowed}, but is missing; add it{means}"
    return f"{allowed}, got {shown(details['input'])}; change it{means}"


def allowed_values(path: str, schema: dict[str, Any]) -> str:
    """Return what the key at a YAML path may hold, in words; `schema` is the JSON schema of a recipe."""
    return _allowed(_field_schema(schema, path), schema)


def _field_schema(root: dict[str, Any], path: str) -> dict[str, Any]:
    schema = root
    for name in path.split(".") if path else ():
        schema = _resolved(schema, root)["properties"][name]
    return schema


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    schema = next((option for option in schema.get("anyOf", ()) if "$ref" in option), schema)  # a section or null
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _allowed(field: dict[str, Any], root: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in field:
        return _either([_allowed(option, root) for option in field["anyOf"]])
    if "enum" in field or "const" in field:
        return _either([str(option) for option in field.get("enum", [field.get("const")])])
    schema = _resolved(field, root)
    if schema.get("type") == "object":
        required = ", ".join(schema.get("required", ()))
        return "a mapping of keys" + (f" (at least {required})" if required else "")
    if "pattern" in schema or "minLength" in schema:
        return "text of another form"
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {schema[key]:g}" for key, sign in bounds.items() if key in schema)
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "array": "a list",
    }
    return " ".join(filter(None, [words.get(schema.get("type", ""), schema.get("type", "another value")), limits]))


def _nearest(key: str, paths: list[str]) -> tuple[str, ...]:
    names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    return tuple(names[name] for name in difflib.get_close_matches(key, names, n=1, cutoff=0.7))


def _either(words: list[str] | tuple[str, ...], word: str = "or") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {word} {words[-1]}"
