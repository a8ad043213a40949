"""Records of a source to tokens with a loss mask: plain text, prompt and completion, chats, or ready token ids.

The kind is found by looking at the first record: the first of these fields that it has.

    messages              chat by the tokenizer's template, loss on what the assistant says
    input_ids             tokens as they are; a mask next to them says where the loss is, else everywhere
    prompt, completion    loss on the completion and its end-of-text
    text                  loss everywhere

Every record of a source is of that kind; another one, a missing field or a wrong value is a `DataError` that names
record and field. Cutting and removing is the part of `ms_varlen.data.tokens.cleaning`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ms_varlen.data.sources.record import FIELDS, KINDS, LOSS_FIELDS, Record, masks_of
from ms_varlen.data.sources.record_batches import json_fault
from ms_varlen.data.tokens.chat import ASSISTANT, LOSS_FLAGS, ROLES, is_silent
from ms_varlen.data.tokens.ready_tokens import check_ids, check_masks, target_key, tokens_of
from ms_varlen.data.tokens.tokenizers import Tokenizer
from ms_varlen.errors import DataError, located

ABOUT = {
    "messages": "chats, loss on the assistant's turns",
    "tokens": "ready token ids, loss where labels or a mask say so, else on every token",
    "completion": "prompts and completions, loss on the completions",
    "text": "plain text, loss on every token",
}
UNKNOWN_KINDS = {
    "conversations": "write each turn {from, value} as {role, content}, under 'messages'",
    "instruction": "write 'prompt' (instruction and input) and 'completion' (output)",
}
"""What to do about the fields of common kinds that are not read here."""
EXCERPT = 160
"""Characters of a record that are kept to show it."""

# Neither tab, line feed, vertical tab, form feed nor carriage return, which text files have for good reasons.
_CONTROL = bytes(code for code in range(32) if not 9 <= code <= 13) + b"\x7f"
_REPLACEMENT = "\ufffd".encode()
"""What stands in a text where a byte could not be decoded."""


@dataclasses.dataclass
class Encoded:
    """A record as tokens.

    Attributes:
        ids: [n] int32.
        supervised: [n] bool, whether each token is a target; None when all are.
        key: 8 bytes, a hash of what the record says: which are held out, and which are duplicates.
        where: the record's place.
        excerpt: its beginning, at most `EXCERPT` characters.
        empty: it says nothing: no text or completion, or white space only.
        control: control and replacement characters found in it.
    """

    ids: np.ndarray
    supervised: np.ndarray | None
    key: bytes
    where: str
    excerpt: str
    empty: bool
    control: int


def find_kind(record: Record) -> str:
    """The kind of a record: one of `KINDS`.

    Raises:
        DataError: it has the fields of no kind.
    """
    # Tables fill the fields that a record does not have with null.
    for there in (lambda field: record.fields.get(field) is not None, record.fields.__contains__):
        for kind, fields in KINDS.items():
            if there(fields[0]):
                return kind
    hints = (hint for field, hint in UNKNOWN_KINDS.items() if field in record.fields)
    raise DataError(
        f"a record must have field 'text', 'messages', 'input_ids' or 'prompt' and 'completion', got "
        f"{_names(record)}, in {record.where}; {next(hints, 'rename the field that holds the text')}"
    )


def kind_sentence(kind: str, record: Record, tokenizer: Tokenizer) -> str:
    """What a log says about the kind that was found in `record`, and about the special tokens of its texts."""
    others = [field for field in FIELDS if field in record.fields and field not in KINDS[kind]]
    beside = f" (also {', '.join(others)})" if others else ""
    if kind == "messages":
        special = "special tokens are those of the chat template"
    elif kind == "tokens":
        special = f"{_said_by_masks(record)}; nothing is added to the ids"
        beside = ""
    else:
        handling = tokenizer.handling
        special = f"end-of-text: {handling['end_of_text']}; beginning-of-text: {handling['beginning_of_text']}"
    pad = tokenizer.handling["pad"]
    return f"records are {kind}, found in {record.where}{beside}: {ABOUT[kind]}; {special}; pad: {pad}"


def _said_by_masks(record: Record) -> str:
    masks = masks_of(record.fields)
    loss = [field for field in masks if field in LOSS_FIELDS]
    ignored = [field for field in (*record.fields, *record.unread) if field not in ("input_ids", *masks)]
    said = f"loss by {' and '.join(loss)}" if loss else "loss on every token"
    return f"{said}; fields used: {', '.join(('input_ids', *masks))}; ignored: {', '.join(ignored) or 'none'}"


class RecordEncoder:
    """Makes tokens of records of one kind; can be pickled.

    Args:
        tokenizer: of the texts; ready ids are checked against its vocabulary.
        kind: one of `KINDS`.
        control_characters: "remove" takes them out of texts, "error" refuses a text with one, else they stay.
        labels_shifted: whether `labels` name the next token rather than their own.
        masks: the fields of `MASK_FIELDS` that the source's first record has, and every other must have.
    Raises:
        DataError: the kind needs a chat template and the tokenizer has none, or has no labels to be shifted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kind: str,
        control_characters: str = "keep",
        labels_shifted: bool = False,
        masks: tuple[str, ...] = (),
    ):
        if kind == "messages" and tokenizer.chat_template is None:
            raise DataError(
                f"data.tokenizer must have a chat template for records of messages, got none in {tokenizer.name}; use "
                "the tokenizer of a chat model, or put a chat_template.jinja next to its files"
            )
        if labels_shifted and kind != "tokens":
            raise DataError(
                f"data.labels_shifted must be left out for records of kind {kind}, got true; only records with "
                "input_ids have labels"
            )
        self.kind = kind
        self._masks = masks
        self._tokenizer = tokenizer
        self._control_characters = control_characters
        self._labels_shifted = labels_shifted

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """Tokens of each record.

        Raises:
            DataError: the first record with a fault, by place and field.
        """
        makers: dict[str, Callable[[Sequence[Record]], list[Encoded]]] = {
            "messages": self._chats,
            "tokens": self._tokens,
            "completion": self._completions,
            "text": self._texts,
        }
        return makers[self.kind](records)

    def _texts(self, records: Sequence[Record]) -> list[Encoded]:
        found = []
        for record in records:
            with located(record.where):
                found.append(self._text(self._value(record, "text"), "text"))
        ids = self._tokenizer.encode_documents([text for text, _ in found])
        return [
            Encoded(
                ids[i],
                None,
                _key(found[i][0].encode()),
                record.where,
                record.fields["text"][:EXCERPT],
                not found[i][0].strip(),
                found[i][1],
            )
            for i, record in enumerate(records)
        ]

    def _completions(self, records: Sequence[Record]) -> list[Encoded]:
        texts, spans, found = [], [], []
        for record in records:
            with located(record.where):
                parts = [self._value(record, field) for field in KINDS["completion"]]
                (prompt, first), (completion, second) = map(self._text, parts, KINDS["completion"])
            texts.append(prompt + completion)
            spans.append([(len(prompt), len(prompt) + len(completion))] if completion else [])
            found.append(
                (_json_key([prompt, completion]), "".join(parts)[:EXCERPT], not completion.strip(), first + second)
            )
        masked = self._tokenizer.encode_spans(texts, spans, documents=True)
        return _joined(records, masked, found)

    def _chats(self, records: Sequence[Record]) -> list[Encoded]:
        template = self._tokenizer.chat_template
        assert template is not None
        texts, spans, found = [], [], []
        for record in records:
            with located(record.where):
                tools = _tools(record)
                cleaned, silent, control = self._messages(self._value(record, "messages"))
                text, said = template.conversation(cleaned, tools, silent) if cleaned else ("", [])
                key = _json_key([cleaned, tools, *([silent] if silent else [])])
            texts.append(text)
            spans.append(said)
            spoken = [message.get("content") or "" for message in cleaned]
            excerpt = "\n".join(f"{m['role']}: {part}" for m, part in zip(cleaned, spoken, strict=True))[:EXCERPT]
            empty = not any(part.strip() for part in spoken) and not any("tool_calls" in m for m in cleaned)
            found.append((key, excerpt, empty, control))
        return _joined(records, self._tokenizer.encode_spans(texts, spans, documents=False), found)

    def _tokens(self, records: Sequence[Record]) -> list[Encoded]:
        encoded = []
        for record in records:
            with located(record.where):
                self._value(record, "input_ids")
                check_masks(record.fields, self._masks)
                ids, supervised = tokens_of(record.fields, self._labels_shifted)
                check_ids(ids, self._tokenizer.vocab_size, self._tokenizer.name)
            ids = ids.astype(np.int32)
            excerpt = f"ids {' '.join(map(str, ids[:40].tolist()))}"[:EXCERPT]
            encoded.append(
                Encoded(ids, supervised, _key(target_key(ids, supervised)), record.where, excerpt, not ids.size, 0)
            )
        return encoded

    def _value(self, record: Record, field: str) -> Any:
        value = record.fields.get(field)
        if value is not None:
            return value
        if field == "completion" and "prompt" in record.fields:
            raise DataError(
                f"field 'completion' must be next to 'prompt', got {_names(record)}; add the "
                "completions: a prompt alone teaches nothing (or name the field 'text' to learn all of it)"
            )
        if field in record.fields:
            raise DataError(f"field '{field}' must be there, got null; fix or remove the record")
        raise DataError(
            f"field '{field}' must be there in every record of kind {self.kind}, got {_names(record)}"
            f"; a source holds records of one kind, that of its first: fix the record or part the source"
        )

    def _text(self, value: Any, field: str) -> tuple[str, int]:
        """A text as it will be tokenised, and how many control characters it had."""
        if not isinstance(value, str):
            raise DataError(f"field '{field}' must be a string, got {type(value).__name__}; fix or remove the record")
        raw = _utf8(value, field)
        control = len(raw) - len(raw.translate(None, _CONTROL)) + raw.count(_REPLACEMENT)
        if not control or self._control_characters not in ("remove", "error"):
            return value, control
        if self._control_characters == "remove":
            return raw.translate(None, _CONTROL).replace(_REPLACEMENT, b"").decode(), control
        place = next(i for i, c in enumerate(value) if c in _CONTROL.decode() + "\ufffd")
        raise DataError(
            f"field '{field}' must have no control character under data.control_characters=error, got "
            f"U+{ord(value[place]):04X} at character {place}; fix the text, or set "
            "data.control_characters to keep, remove or drop"
        )

    def _messages(self, messages: Any) -> tuple[list[dict[str, Any]], list[int], int]:
        """Messages as they will be rendered, the assistant's without a loss, and how many control characters."""
        if not isinstance(messages, list):
            raise _wrong("messages", "a list of objects with role and content", messages)
        cleaned, silent, total = [], [], 0
        for number, message in enumerate(messages):
            name = f"messages[{number}]"
            if not isinstance(message, Mapping):
                raise _wrong(name, "an object with role and content", message)
            # Tables fill the fields that a message does not have with null.
            entry = {key: value for key, value in message.items() if value is not None}
            if entry.get("role") not in ROLES:
                raise DataError(
                    f"field '{name}.role' must be one of {', '.join(ROLES)}, got {entry.get('role')!r}; rename the role"
                )
            if "content" in entry or entry["role"] != ASSISTANT or not entry.get("tool_calls"):
                entry["content"], control = self._text(message.get("content"), f"{name}.content")
                total += control
            if is_silent(entry, name):
                silent.append(number)
            cleaned.append({key: value for key, value in entry.items() if key not in LOSS_FLAGS})
        return cleaned, silent, total


def _wrong(field: str, rule: str, value: Any) -> DataError:
    return DataError(f"field '{field}' must be {rule}, got {type(value).__name__}; fix or remove the record")


def _names(record: Record) -> str:
    names = list(record.fields)
    return ("fields " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) if names else "no field"


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"field '{field}' must be Unicode text, got half a surrogate pair; fix the \\u escapes"
        ) from error


def _tools(record: Record) -> list[Any] | None:
    """The tools of a chat, which some data sets keep as JSON text."""
    tools = record.fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"field 'tools' must be JSON, got {json_fault(error)}; fix the record") from error
    if tools is not None and not isinstance(tools, list):
        raise _wrong("tools", "a list of JSON schemas", tools)
    return tools


def _key(said: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=8, person=b"ms_varlen.eval").digest()


def _json_key(said: Any) -> bytes:
    try:
        text = json.dumps(said, sort_keys=True, ensure_ascii=False, default=str)
    except (RecursionError, TypeError) as error:  # TypeError: names of several types cannot be put in order
        raise DataError(
            f"field 'messages' must be JSON that can be written, got {type(error).__name__}; fix or remove the record"
        ) from error
    return _key(_utf8(text, "messages"))


def _joined(
    records: Sequence[Record],
    masked: list[tuple[np.ndarray, np.ndarray]],
    found: list[tuple[bytes, str, bool, int]],
) -> list[Encoded]:
    return [
        Encoded(ids, mask, key, record.where, excerpt, empty, control)
        for record, (ids, mask), (key, excerpt, empty, control) in zip(records, masked, found, strict=True)
    ]
