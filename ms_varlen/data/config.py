"""The `data` section of a recipe."""

import dataclasses
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ms_varlen.data.sources.file_kinds import source_fault
from ms_varlen.files import user_cache

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

    source: str | list[str] = Field(
        description="'pydoc' (docstrings of the running Python's standard library); 'lognormal(median=180, p99=2048, "
        "samples=20000, seed=0)', random words whose numbers of bytes, end-of-text included, are lognormal; the path "
        "of a .jsonl, .json or .ndjson file with one object a line (also .gz), a .parquet file, a .txt file (one "
        "document), a Megatron .bin, a .mindrecord file, a Hugging Face data set saved on disk, or a folder of files "
        "of one kind; or a list of these, read one after another"
    )
    validation_source: str | list[str] | None = Field(
        None, description="as source: what evaluation reads, instead of a share of source"
    )
    tokenizer: str = Field(
        description="'bytes' (256 byte values, end-of-text, pad), the path of a tokenizer.json, or a folder that "
        "transformers' AutoTokenizer opens"
    )
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
        description="share of documents held out for evaluation, from 0 to below 1, by hash of their content; "
        "left out where validation_source is given",
    )
    store_dir: str | None = Field(
        None, description="folder of the token stores; null means ms_varlen/token_stores in the user's cache folder"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=256,
        description="processes that turn records into tokens, for sources above 8 MB; null means one a core, at most "
        "16. The store is the same with any number",
    )

    keep: Literal["head", "tail", "both"] = Field(
        "head",
        description="what overlong=truncate keeps of a document: its beginning, its end, or half of each. A document "
        "with no loss in what is kept is removed and counted",
    )
    deduplicate: bool = Field(
        False,
        description="remove documents that are the same as one before, by a 64-bit hash of their content; takes 8 to "
        "16 bytes of memory a document",
    )
    control_characters: Literal["keep", "remove", "drop", "error"] = Field(
        "keep",
        description="what happens to a text with control characters (all but tab and line ends) or U+FFFD, which "
        "stands for what could not be decoded: it stays, loses them, is dropped, or is an error. Counted in every case",
    )
    labels_shifted: bool = Field(
        False,
        description="set where the 'labels' of records with 'input_ids' name the next token rather than their own; a "
        "last label other than -100 then counts as one more token",
    )

    @field_validator("source", "validation_source")
    @classmethod
    def _known_source(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and not value:
            raise ValueError("must name a source, got an empty list")
        for name in source_names(value):
            if is_lognormal(name):
                LognormalLengths.parse(name)
            elif not name.strip() or "\0" in name:
                raise ValueError(f"must be a path, '{PYDOC}' or '{LOGNORMAL}(...)', got {name!r}")
        return value

    @model_validator(mode="after")
    def _one_way_to_evaluate(self) -> "DataConfig":
        if self.validation_source is not None and "eval_fraction" in self.model_fields_set and self.eval_fraction:
            raise ValueError(
                f"eval_fraction must be left out with validation_source, got {self.eval_fraction}; "
                "evaluation reads one or the other"
            )
        return self

    @field_validator("tokenizer")
    @classmethod
    def _known_tokenizer(cls, value: str) -> str:
        if not value.strip() or "\0" in value:
            raise ValueError(f"must be '{BYTES}', or the path of a tokenizer.json or of a folder, got {value!r}")
        return value

    @model_validator(mode="after")
    def _keep_is_of_truncate(self) -> "DataConfig":
        if self.keep != "head" and self.overlong != "truncate":
            raise ValueError(
                f"keep must be left out with overlong={self.overlong}, got {self.keep}; set overlong=truncate"
            )
        return self


def source_names(source: str | list[str] | None) -> list[str]:
    """The sources that a field names, one after another."""
    if source is None:
        return []
    return [source] if isinstance(source, str) else source


def missing_files(config: DataConfig) -> list[tuple[str, str]]:
    """The fields of `config` that name a file which is not there or cannot be read.

    Returns:
        (field, message) pairs, e.g. ``("source", "must be an existing file or folder, got corpus.jsonl; ...")``.
    """
    faults = [
        (field, fault)
        for field in ("source", "validation_source")
        for name in source_names(getattr(config, field))
        if name != PYDOC and not is_lognormal(name) and (fault := source_fault(name)) is not None
    ]
    if config.tokenizer != BYTES and not _exists(config.tokenizer):
        faults.append(
            (
                "tokenizer",
                f"must be an existing file or folder, got {config.tokenizer}; correct the path or use '{BYTES}', which "
                "needs none",
            )
        )
    return faults


def _exists(value: str) -> bool:
    try:
        return Path(value).expanduser().exists()
    except OSError:  # a name that is too long, say
        return False


def store_root(config: DataConfig) -> Path:
    """The folder that holds the token stores: `store_dir`, or a folder in the user's cache."""
    if config.store_dir is not None:
        return Path(config.store_dir).expanduser()
    return user_cache("token_stores")
