"""The table of recipe keys: what each key decides.

From it follow the identity of a token store, the keys that may change when a run resumes, the keys that ranks must
agree on, the name of a compile cache entry, and the columns of docs/recipe.md. It is a ground module without imports of
the project, because the rooms of data and checkpoints, below that of the recipe, read it too.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any


class Decides(enum.Flag):
    """What the value of a key has an effect on."""

    NOTHING = 0
    """Bookkeeping: what is measured, kept or allowed."""
    NODE = enum.auto()
    """Where one node keeps its files, and how it works on them."""
    DATA = enum.auto()
    """The samples of the token store."""
    PLAN = enum.auto()
    """Which samples make a step, and how they lie on T."""
    GRAPH = enum.auto()
    """The compiled graphs, apart from their sizes."""
    NUMBERS = enum.auto()
    """Losses and weights."""


@dataclasses.dataclass(frozen=True)
class KeyRole:
    """What a key decides.

    Attributes:
        decides: see `Decides`.
        by_content: the key is a path; only the content found there counts, which the store's fingerprint covers.
        extends: the key may be changed to make a run longer.
    """

    decides: Decides
    by_content: bool = False
    extends: bool = False

    @property
    def may_change(self) -> bool:
        """The key may change when a run resumes: the numbers of the remaining steps stay."""
        return self.extends or not self.decides & ~(Decides.NODE | Decides.GRAPH)

    @property
    def replans(self) -> bool:
        """A change of the key on resume plans the rest of the epoch again."""
        return self.decides == Decides.PLAN

    @property
    def may_differ(self) -> bool:
        """Ranks of one run may have different values."""
        return self.by_content or self.decides == Decides.NODE


_NOTHING, _NODE = KeyRole(Decides.NOTHING), KeyRole(Decides.NODE)
_DATA, _CONTENT = KeyRole(Decides.DATA), KeyRole(Decides.DATA, by_content=True)
_PLAN, _NUMBERS = KeyRole(Decides.PLAN), KeyRole(Decides.NUMBERS)
_COMPILED = KeyRole(Decides.GRAPH | Decides.NUMBERS)
_LENGTH = KeyRole(Decides.DATA | Decides.GRAPH | Decides.NUMBERS)

KEY_ROLES: dict[str, KeyRole] = {
    "mode": _PLAN,
    "data.source": _CONTENT,
    "data.validation_source": _CONTENT,
    "data.tokenizer": _CONTENT,
    "data.min_tokens": _DATA,
    "data.overlong": _DATA,
    "data.eval_fraction": _DATA,
    "data.store_dir": _NODE,
    "data.workers": _NODE,
    "data.keep": _DATA,
    "data.deduplicate": _DATA,
    "data.control_characters": _DATA,
    "data.labels_shifted": _DATA,
    "batch": _PLAN,
    "shapes": _PLAN,
    "model.config": _COMPILED,
    "model.init_from": _NUMBERS,
    "model.variable_seq_lengths": _PLAN,  # follows from the mode
    "model.seq_length": _LENGTH,
    "model.max_position_embeddings": _LENGTH,
    "model.attention_dropout": _COMPILED,
    "model.recompute": _COMPILED,
    "train.steps": KeyRole(Decides.NUMBERS, extends=True),  # the schedule of the learning rate ends there
    "train.learning_rate": _NUMBERS,
    "train.min_lr_ratio": _NUMBERS,
    "train.warmup_steps": _NUMBERS,
    "train.schedule": _NUMBERS,
    "train.clip_grad_norm": _COMPILED,
    "train.weight_decay": _COMPILED,
    "train.beta1": _COMPILED,
    "train.beta2": _COMPILED,
    "train.eps": _COMPILED,
    "train.seed": _NUMBERS,
    "train.eval_every": _NOTHING,
    "train.max_bad_steps": _NOTHING,
    "graph.mode": _COMPILED,
    "graph.jit_level": _COMPILED,
    "graph.compile_cache": _NODE,
    "graph.max_graphs": _NOTHING,
    "checkpoint.output_dir": _NOTHING,  # all ranks follow rank 0's
    "checkpoint.every": _NOTHING,
    "checkpoint.keep": _NOTHING,
    "checkpoint.on_save_error": _NOTHING,
    "checkpoint.resume": _NOTHING,
    "device.target": _COMPILED,
    "device.max_memory": KeyRole(Decides.GRAPH),
    "device.deterministic": _COMPILED,
    "device.hccl_connect_seconds": _NOTHING,
    "device.hccl_exec_seconds": _NOTHING,
    "device.profile_steps": _NOTHING,
}
"""Each key of a recipe; `batch`, `shapes` and `model.config` stand for all keys below them."""

UNKNOWN = _COMPILED
"""A key of another version of the recipe: nothing may differ in it."""


def key_role(key: str) -> KeyRole:
    """The role of a dotted key, or of the section that stands for it in the table."""
    while key and key not in KEY_ROLES:
        key = key.rpartition(".")[0]
    return KEY_ROLES.get(key, UNKNOWN)


def dotted(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value of a nested mapping."""
    for key, entry in value.items():
        if isinstance(entry, Mapping) and entry:
            yield from dotted(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry
