"""Text to token ids: bytes, any `tokenizer.json`, or a transformers folder.

A document ends with one end-of-text id when the tokenizer has one; it is a real token and a real target. What its own
template adds (a beginning-of-text id, say) stays. Chats get neither: the chat template writes all special tokens.
Lengths are carried next to the ids and never guessed from them, so a pad id may equal any other id.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer

from ms_varlen.data.config import BYTES
from ms_varlen.data.sources.record_batches import json_fault
from ms_varlen.data.tokens.chat import ChatTemplate, Span, chat_templates
from ms_varlen.errors import DataError, located

# What an end-of-text token is called where no tokenizer_config.json says it, in order of preference.
END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# The files of a transformers folder that may decide the ids; weights and the model's own settings do not.
DECIDING_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
)

Masked = tuple[np.ndarray, np.ndarray]
"""[n] int32 ids and [n] bool, whether each is a target."""


class Tokenizer(Protocol):
    """What making records of tokens needs of a tokenizer; it can be pickled.

    Attributes:
        name: for people.
        fingerprint: hash of everything that decides the ids.
        vocab_size: one more than the largest id.
        eos_id: the end-of-text id, None when there is none.
        pad_id: fills padded places; they are never looked at.
        chat_template: None when there is none.
        handling: `end_of_text`, `beginning_of_text` and `pad`, in words.
    """

    name: str
    fingerprint: str
    vocab_size: int
    eos_id: int | None
    pad_id: int
    chat_template: ChatTemplate | None
    handling: dict[str, str]

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the ids of the text alone."""
        ...

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n] int32 for each text: the ids of a whole document, end-of-text included."""
        ...

    def encode_spans(self, texts: list[str], spans: Sequence[Sequence[Span]], documents: bool) -> list[Masked]:
        """Ids of texts with targets in parts of them. A token is a target when any of its characters lies in a span.

        Args:
            texts: any.
            spans: of each text, in order and apart.
            documents: whole documents, ids as of `encode_documents`; what follows the last span is a target too then.
                Else the ids of the texts alone.
        """
        ...


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a token store notes about its tokenizer, as JSON values."""
    names = ("name", "vocab_size", "eos_id", "pad_id", "fingerprint")
    return {name: getattr(tokenizer, name) for name in names} | tokenizer.handling


class ByteTokenizer:
    """UTF-8 bytes: ids 0 to 255 are the byte values, 256 is end-of-text, 257 is the pad."""

    name = BYTES
    fingerprint = "bytes-256-eos-pad"
    vocab_size = 258
    eos_id: int | None = 256
    pad_id = 257
    chat_template: ChatTemplate | None = None
    handling = {  # noqa: RUF012, never changed
        "end_of_text": "256, appended to every document",
        "beginning_of_text": "none",
        "pad": "257",
    }

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n + 1] int32 for each text: its bytes and the end-of-text id."""
        documents = []
        for text in texts:
            ids = np.frombuffer(text.encode() + b"\0", np.uint8).astype(np.int32)
            ids[-1] = 256
            documents.append(ids)
        return documents

    def encode_spans(self, texts: list[str], spans: Sequence[Sequence[Span]], documents: bool) -> list[Masked]:
        """See `Tokenizer`."""
        masked = []
        for text, parts in zip(texts, spans, strict=True):
            ids = self.encode_documents([text])[0] if documents else self.encode(text)
            mask = np.zeros(ids.size, bool)
            for start, end in parts:
                first = len(text[:start].encode())
                mask[first : first + len(text[start:end].encode())] = True
            if documents and parts:
                mask[-1] = True
            masked.append((ids, mask))
        return masked


class FastTokenizer:
    """A tokenizer of the `tokenizers` package, with what else is known of it.

    Documents get what its own template adds, then end-of-text unless the template ends with it already. Truncation and
    padding that its file asks for are switched off: cutting is `data.overlong`'s part, and padding must not become
    tokens.

    Args:
        rust: the tokenizer; it has a vocabulary.
        name: for people.
        fingerprint: hash of everything that decides the ids.
        special_tokens: texts by name: `eos_token`, `bos_token`, `pad_token` and more. Where there is no `eos_token`,
            end-of-text is the first of `END_OF_TEXT_NAMES` in the vocabulary; without a `pad_token` the pad is
            end-of-text or 0.
        chat_sources: chat templates by name.
        where: file or folder, for an error.
    Raises:
        DataError: a special token is not in the vocabulary, or the vocabulary is empty.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        name: str,
        fingerprint: str,
        special_tokens: dict[str, str],
        chat_sources: dict[str, str] | None,
        where: Path,
    ):
        self._rust = rust
        self._rust.no_truncation()
        self._rust.no_padding()
        vocabulary = rust.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"data.tokenizer must have a vocabulary, got an empty one, in {where}; train it first")
        self.name, self.fingerprint = name, fingerprint
        self.vocab_size = max(vocabulary.values()) + 1
        known = dict(special_tokens)
        guessed = next((name for name in END_OF_TEXT_NAMES if name in vocabulary), None)
        if guessed is not None:
            known.setdefault("eos_token", guessed)
        for field in ("eos_token", "pad_token"):
            if field in known and known[field] not in vocabulary:
                raise DataError(
                    f"{field} must be in the vocabulary, got {known[field]!r}, in {where}; fix or remove the entry"
                )
        self.eos_id = vocabulary[known["eos_token"]] if "eos_token" in known else None
        self.pad_id = vocabulary[known["pad_token"]] if "pad_token" in known else self.eos_id or 0
        self.chat_template = ChatTemplate(chat_sources, known) if chat_sources else None
        # Asked of the template once: a document's own ids say nothing about what the template adds.
        template, alone = (rust.encode("a", add_special_tokens=added).ids for added in (True, False))
        self._ends_itself = bool(template) and template != alone and template[-1] == self.eos_id
        self.handling = {
            "end_of_text": _end_of_text(known.get("eos_token"), self.eos_id, self._ends_itself),
            "beginning_of_text": _beginning_of_text(rust, template, alone),
            "pad": _pad(known, self.pad_id, self.eos_id),
        }

    def encode(self, text: str) -> np.ndarray:
        """[n] int32, the ids of the text alone, without the template's special tokens."""
        return np.array(self._rust.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """[n] int32 for each text: the template's ids and end-of-text."""
        end = self._end()
        return [np.array(encoding.ids + end, np.int32) for encoding in self._rust.encode_batch_fast(texts)]

    def encode_spans(self, texts: list[str], spans: Sequence[Sequence[Span]], documents: bool) -> list[Masked]:
        """See `Tokenizer`."""
        end = self._end() if documents else []
        masked = []
        for encoding, parts in zip(self._rust.encode_batch(texts, add_special_tokens=documents), spans, strict=True):
            ids = np.array(encoding.ids + end, np.int32)
            mask = np.zeros(ids.size, bool)
            last = 0
            for start, stop in parts:
                first, last = _covered(encoding, start, stop)
                mask[first:last] = True
            if documents and last:
                mask[last:] = True
            masked.append((ids, mask))
        return masked

    def _end(self) -> list[int]:
        return [] if self.eos_id is None or self._ends_itself else [self.eos_id]


def _covered(encoding: Encoding, start: int, stop: int) -> tuple[int, int]:
    """First and one past the last token with a character in start .. stop; (0, 0) when there is none.

    Space around words may belong to no token, and a character to several: an emoji of four byte tokens, say.
    """
    found = (encoding.char_to_token(place) for place in range(start, stop))
    first = next((token for token in found if token is not None), None)
    if first is None:
        return 0, 0
    found = (encoding.char_to_token(place) for place in range(stop - 1, start - 1, -1))
    last = next(token for token in found if token is not None) + 1
    while last < len(encoding) and (place := encoding.token_to_chars(last)) is not None and place[0] < stop:
        last += 1
    return first, last


def _end_of_text(token: str | None, eos_id: int | None, ends_itself: bool) -> str:
    if eos_id is None:
        return "none: documents end without a mark"
    by = "added by the tokenizer itself" if ends_itself else "appended to every document"
    return f"{token} ({eos_id}), {by}"


def _beginning_of_text(rust: RustTokenizer, template: list[int], alone: list[int]) -> str:
    before = template[: len(template) - len(alone)]
    while before and template[len(before) : len(before) + len(alone)] != alone:
        before.pop()
    if not before or template == alone:
        return "none"
    names = ", ".join(f"{rust.id_to_token(token)} ({token})" for token in before)
    return f"{names}, added by the tokenizer itself"


def _pad(known: dict[str, str], pad_id: int, eos_id: int | None) -> str:
    if "pad_token" in known:
        return f"{known['pad_token']} ({pad_id})"
    return f"{pad_id}, {'end-of-text' if eos_id is not None else 'the first id'}: the tokenizer has no pad"


def _from_file(path: Path, fingerprint: str) -> FastTokenizer:
    """The tokenizer of a tokenizer.json; files next to it give special tokens and chat template."""
    try:
        rust = RustTokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"data.tokenizer must be a tokenizer.json, got {error}, in {path}; name another file"
        ) from error
    settings = _settings(path.with_name(CONFIG_FILE))
    special = {}
    for field, token in settings.items():
        token = token.get("content") if isinstance(token, dict) else token
        if field.endswith("_token") and isinstance(token, str):
            special[field] = token
    return FastTokenizer(rust, path.name, fingerprint, special, _chat_templates(path.parent, settings), path)


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str] | None:
    """The chat templates of a folder's own file, else those of its settings."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return chat_templates(_template_text(path))
    with located(folder / CONFIG_FILE):
        return chat_templates(settings.get("chat_template"))


def _template_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"a chat template must be UTF-8, got another byte at {error.start}, in {path}; save it as UTF-8"
        ) from error


def _settings(path: Path) -> dict[str, Any]:
    """A tokenizer_config.json; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{CONFIG_FILE} must be JSON, got {json_fault(error)}, in {path}; fix or remove it") from error
    if not isinstance(settings, dict):
        raise DataError(f"{CONFIG_FILE} must be a JSON object, got {type(settings).__name__}, in {path}; fix it")
    return settings


def _from_folder(folder: Path, fingerprint: str) -> FastTokenizer:
    """The tokenizer that transformers finds in a folder; no network, no code of the folder's own."""
    # What transformers says about a wrong template names neither file nor field.
    _chat_templates(folder, _settings(folder / CONFIG_FILE))
    for path in folder.glob("additional_chat_templates/*.jinja"):
        _template_text(path)
    try:
        from transformers import AutoTokenizer  # takes seconds to import

        found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise _missing_package(error, folder) from error
    # The last three are what transformers raises for files of the right names with anything else in them.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"data.tokenizer must be a folder that transformers' AutoTokenizer opens, got {_first_line(error)}, in "
            f"{folder}; give the folder of a model, or the path of a {TOKENIZER_FILE}"
        ) from error
    if not found.is_fast:
        raise DataError(
            f"data.tokenizer must have a fast form, got {type(found).__name__}, in {folder}; convert it into a "
            f"{TOKENIZER_FILE}"
        )
    rust = RustTokenizer.from_str(found.backend_tokenizer.to_str())
    special = {name: str(token) for name, token in found.special_tokens_map.items() if not isinstance(token, list)}
    with located(folder):
        templates = chat_templates(found.chat_template)
    return FastTokenizer(rust, folder.name, fingerprint, special, templates, folder)


def _missing_package(error: ImportError, folder: Path) -> DataError:
    return DataError(
        f"data.tokenizer must have the packages that its folder needs, got {_first_line(error)}, in {folder}; install "
        f"transformers and what it asks for, or give the path of a {TOKENIZER_FILE}"
    )


def _first_line(error: Exception) -> str:
    """What transformers says, without the lists of all that it knows."""
    line = (f"no {error}" if isinstance(error, KeyError) else str(error)).strip().partition("\n")[0]
    return re.split(r"\.\s*Currently available|,? or contain one of the following", line)[0][:200]


def tokenizer_fingerprint(tokenizer: str) -> str:
    """A hash of all files that may decide the ids of the tokenizer that `data.tokenizer` names; loads nothing.

    Raises:
        DataError: there is no such file or folder.
    """
    if tokenizer == BYTES:
        return ByteTokenizer.fingerprint
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        about = _transformers_version(path) if _needs_transformers(path) else ""
        files = {file for pattern in DECIDING_FILES for file in path.glob(pattern) if file.is_file()}
        base = path
    elif path.is_file():
        about, base = "", path.parent
        files = {path, *(file for name in (CONFIG_FILE, TEMPLATE_FILE) if (file := base / name).is_file())}
    else:
        raise DataError(f"data.tokenizer must be an existing file or folder, got {path}; correct the path")
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for file in sorted(files):
        content = file.read_bytes()
        name = TOKENIZER_FILE if file == path else file.relative_to(base).as_posix()
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _transformers_version(folder: Path) -> str:
    """What transformers makes of a folder is its version's affair too."""
    try:
        return f"transformers {metadata.version('transformers')}"
    except metadata.PackageNotFoundError as error:
        raise _missing_package(error, folder) from error


def _needs_transformers(folder: Path) -> bool:
    """A folder with nothing but a tokenizer.json is that file."""
    return not (folder / TOKENIZER_FILE).is_file() or (folder / CONFIG_FILE).is_file()


def open_tokenizer(tokenizer: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, the path of a tokenizer.json, or a transformers folder."""
    if tokenizer == BYTES:
        return ByteTokenizer()
    fingerprint = tokenizer_fingerprint(tokenizer)
    path = Path(tokenizer).expanduser()
    if path.is_file():
        return _from_file(path, fingerprint)
    return (
        _from_folder(path, fingerprint) if _needs_transformers(path) else _from_file(path / TOKENIZER_FILE, fingerprint)
    )
