"""The `data` section of a recipe. Imports neither MindSpore nor the tokenizers package."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

PYDOC = "pydoc"
BYTES = "bytes"
LOGNORMAL = "lognormal"

_NUMBER = r"(\w+)\s*=\s*(\d{1,12})"
_LOGNORMAL = re.compile(rf"{LOGNORMAL}\(\s*(?:{_NUMBER}\s*,\s*)*(?:{_NUMBER})?\s*\)")


@dataclasses.dataclass(frozen=True)
class LognormalLengths:
    """A made-up corpus whose lengths are lognormal, written ``lognormal(median=180, p99=2048, samples=20000, seed=0)``.

    Attributes:
        median: tokens per document, end-of-text included, at least 2.
        p99: tokens that one document in a hundred exceeds, above the median.
        samples: documents, at least 1.
        seed: of lengths and texts.
    """

    median: int = 180
    p99: int = 2048
    samples: int = 20000
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "LognormalLengths":
        """Read the written form; any of the values may be left out.

        Raises:
            ValueError: it is no such form, names an unknown or repeated value, or breaks a bound.
        """
        pairs = re.findall(_NUMBER, text)
        values = {name: int(value) for name, value in pairs}
        names = [field.name for field in dataclasses.fields(cls)]
        if not _LOGNORMAL.fullmatch(text.strip()) or not values.keys() <= set(names) or len(values) < len(pairs):
            raise ValueError(f"must be {LOGNORMAL}(...) with each of {', '.join(names)} at most once, got {text!r}")
        lengths = cls(**values)
        if not (2 <= lengths.median < lengths.p99 and lengths.samples >= 1):
            raise ValueError(f"must have 2 <= median < p99 and samples >= 1, got {text!r}")
        return lengths


def is_lognormal(source: str) -> bool:
    """Whether `data.source` asks for a made-up corpus."""
    return source.startswith(LOGNORMAL + "(")


class DataConfig(BaseModel):
    """Where text comes from and how it becomes samples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = Field(
        description="'pydoc' (docstrings of the running Python's standard library); the path of a .jsonl file with "
        "one object a line that has a string field 'text'; or 'lognormal(median=180, p99=2048, samples=20000, "
        "seed=0)', random words whose numbers of bytes, end-of-text included, are lognormal"
    )
    tokenizer: str = Field(description="'bytes' (256 byte values, end-of-text, pad), or the path of a tokenizer.json")
    min_tokens: int = Field(
        2,
        ge=2,
        description="tokens, end-of-text included; shorter documents and last pieces are removed and counted. "
        "At least 2, so that every sample has a next token to learn",
    )
    overlong: Literal["truncate", "split", "drop", "error"] = Field(
        "split", description="what happens to a document of more than model.seq_length tokens"
    )
    eval_fraction: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="share of documents held out for evaluation, from 0 to below 1, by hash of their text",
    )
    store_dir: str | None = Field(
        None, description="folder of the token stores; null means ms_varlen/token_stores in the user's cache folder"
    )

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        if is_lognormal(value):
            LognormalLengths.parse(value)
        elif value != PYDOC and not value.endswith(".jsonl"):
            raise ValueError(f"must be '{PYDOC}' or the path of a .jsonl file, got {value!r}")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if value != BYTES and not value.endswith(".json"):
            raise ValueError(f"must be '{BYTES}' or the path of a tokenizer.json, got {value!r}")
        return value


def missing_files(config: DataConfig) -> list[tuple[str, str]]:
    """The fields of `config` that name a file which is not there.

    Returns:
        (field, message) pairs, e.g. ``("source", "must be an existing file, got corpus.jsonl; ...")``.
    """
    builtin = {"source": PYDOC, "tokenizer": BYTES}
    return [
        (
            field,
            f"must be an existing file, got {value}; correct the path or use '{builtin[field]}', which needs no file",
        )
        for field, value in (("source", config.source), ("tokenizer", config.tokenizer))
        if value != builtin[field] and not is_lognormal(value) and not _is_file(value)
    ]


def _is_file(value: str) -> bool:
    try:
        return Path(value).expanduser().is_file()
    except OSError:  # a name that is too long, say
        return False


def store_root(config: DataConfig) -> Path:
    """The folder that holds the token stores: `store_dir`, or a folder in the user's cache."""
    if config.store_dir is not None:
        return Path(config.store_dir).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ms_varlen" / "token_stores"
