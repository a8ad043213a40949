"""Text to token ids: bytes, or any `tokenizer.json`.

A document ends with one end-of-text id when the tokenizer has one; it is a real token and a real target. Lengths are
carried beside the ids and never guessed from them, so a pad id may equal any other id.
"""

import hashlib
import json
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from ms_varlen.data.config import BYTES
from ms_varlen.errors import DataError

# What an end-of-text token is called where no tokenizer_config.json says it, in order of preference.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Tokenizer(Protocol):
    """What the token store needs of a tokenizer.

    Attributes:
        name: for people.
        fingerprint: hash of everything that decides the ids.
        vocab_size: one more than the largest id.
        eos_id: the end-of-text id, None when there is none.
        pad_id: fills padded places; they are never looked at.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int | None
    pad_id: int

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the ids of the text alone."""
        ...

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n] int32 for each text: the ids of a whole document, end-of-text included."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: ids 0 to 255 are the byte values, 256 is end-of-text, 257 is the pad."""

    name = BYTES
    fingerprint = "bytes-256-eos-pad"
    vocab_size = 258
    eos_id: int | None = 256
    pad_id = 257

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n + 1] int32 for each text: its bytes and the end-of-text id."""
        return [np.append(self.encode(text), np.int32(256)) for text in texts]


class JsonTokenizer:
    """A `tokenizer.json` as the `tokenizers` package reads it.

    Documents get what the file's own template adds (a beginning-of-text id, say), then end-of-text unless the template
    ends with it already. Truncation and padding that the file asks for are switched off: cutting is `data.overlong`'s
    part, and padding must not become tokens. End-of-text and pad are read from the `tokenizer_config.json` beside the
    file; where it does not name them, end-of-text is the first of `END_OF_TEXT_NAMES` in the vocabulary, and the pad is
    end-of-text or 0.

    Raises:
        DataError: the file is missing, is no tokenizer, has no vocabulary, or names an end-of-text it does not know.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise DataError(f"data.tokenizer must be an existing file, got {path}; correct the path")
        content = path.read_bytes()
        try:
            self._tokenizer = RustTokenizer.from_buffer(content)
        except ValueError as error:
            raise DataError(
                f"data.tokenizer must be a tokenizer.json, got {error}, in {path}; name another file"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"data.tokenizer must have a vocabulary, got an empty one, in {path}; train it first")
        self.name = path.name
        self.vocab_size = max(vocabulary.values()) + 1
        declared = _declared_tokens(path.with_name("tokenizer_config.json"), vocabulary)
        guessed = (vocabulary[name] for name in END_OF_TEXT_NAMES if name in vocabulary)
        self.eos_id = declared["eos_token"] if "eos_token" in declared else next(guessed, None)
        self.pad_id = declared.get("pad_token", self.eos_id or 0)
        # Asked of the template once: a document's own last id says nothing about what the template adds.
        template = self._tokenizer.encode("a").ids
        self._ends_itself = bool(template) and template[-1] == self.eos_id
        digest = hashlib.blake2b(content, digest_size=16)
        digest.update(f"eos={self.eos_id} pad={self.pad_id} ends_itself={self._ends_itself}".encode())
        self.fingerprint = digest.hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the ids of the text alone, without the template's special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n] int32 for each text: the template's ids and end-of-text; runs on all cores."""
        end = [] if self.eos_id is None or self._ends_itself else [self.eos_id]
        return [np.array(encoding.ids + end, np.int32) for encoding in self._tokenizer.encode_batch(texts)]


def _declared_tokens(path: Path, vocabulary: dict[str, int]) -> dict[str, int]:
    """The ids of `eos_token` and `pad_token` in a tokenizer_config.json, as far as it is there and names them."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"tokenizer_config.json must be JSON, got {error}, in {path}; mend or remove it") from error
    if not isinstance(settings, dict):
        raise DataError(
            f"tokenizer_config.json must be a JSON object, got {type(settings).__name__}, in {path}; mend it"
        )
    ids = {}
    for field in ("eos_token", "pad_token"):
        token = settings.get(field)
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if token not in vocabulary:
            raise DataError(f"{field} must be in the vocabulary, got {token!r}, in {path}; mend or remove the entry")
        ids[field] = vocabulary[token]
    return ids


def open_tokenizer(tokenizer: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes` or the path of a tokenizer.json."""
    return ByteTokenizer() if tokenizer == BYTES else JsonTokenizer(Path(tokenizer).expanduser())
