"""Chats to text by a tokenizer's chat template, and where in that text the assistant speaks.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                        ~~~~~~~~~~~~~~~~~    loss here

A template with ``{% generation %}`` says itself what the assistant's words are. For any other the conversation is
rendered again up to each assistant's turn, once as a prompt and once with the turn: the turn begins where the prompt
ends (its header is no target, the mark that ends it is one). That needs a template that only ever appends; where it
does not, the record is refused. Two exceptions are known: templates that leave the reasoning (``<think>``) out of
earlier turns, and those that put the end-of-text token after the last turn only.

Templates run in Jinja's sandbox with what transformers gives them. `strftime_now` gives `TEMPLATE_DATE` instead of
today, so that a token store does not depend on the day on which it was built.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ms_varlen.errors import DataError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)  # what Llama 3.2's template says where it is given no clock
SHOWN = 200
"""Characters of a template's own error that are shown."""
TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools, where a tokenizer has several."""

_TAGGED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Around what {% generation %} encloses, in a rendering; Unicode keeps these code points out of text.
_START, _END = "\ufdd0generation\ufdd1", "\ufdd1generation\ufdd0"
_END_OF_REASONING = "</think>"
# Words that follow no prompt, by a code point that Unicode keeps out of text.
_OTHER_WORDS = "\ufdd2"
_WHOLE_TAGS = re.compile(r"(?:<[^<>\s]+>\s*)*")

LOSS_FLAGS = ("weight", "train")
"""What a message may say about its loss; no template sees it."""

Message = Mapping[str, Any]
Span = tuple[int, int]
"""First and one past the last character."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat templates; can be pickled.

    Attributes:
        sources: Jinja text by name; one of them is ``default``.
        special_tokens: what the templates know by name, e.g. ``bos_token``.
    """

    sources: dict[str, str]
    special_tokens: dict[str, str]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: each with `role` and `content`.
            tools: their JSON schemas.
            prompt: end with what makes the assistant speak.
        Raises:
            jinja2.TemplateError: the template does not take such a conversation.
        """
        return self._marked(messages, tools, prompt).replace(_START, "").replace(_END, "")

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, silent: Collection[int] = ()
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and what of it the assistant says, in order.

        Args:
            messages: each with `role` and `content`.
            tools: their JSON schemas.
            silent: numbers of assistant's messages that are left out of what it says.
        Raises:
            DataError: the template refuses the conversation, or renders the part before an assistant's turn otherwise
                when the turn follows.
        """
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        try:
            if _TAGGED.search(self._source(tools)):
                text, spans = _unmarked(self._marked(messages, tools, False))
                return text, _spoken(spans, turns, silent)
            text = self.render(messages, tools)
            return text, [self._turn(text, messages, number, tools) for number in turns if number not in silent]
        except DataError:
            raise
        except Exception as error:  # A template is a program that came with the data: it can raise anything.
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"field 'messages' must suit the tokenizer's chat template, which says {found[:SHOWN]}; "
                "fix the record or the template"
            ) from error

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self.sources.get(TOOL_TEMPLATE, self.sources["default"]) if tools else self.sources["default"]

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> str:
        return _compiled(self._source(tools)).render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self.special_tokens
        )

    def _turn(self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None) -> Span:
        """Where the assistant's turn `messages[number]` lies in the whole conversation's `text`."""
        if number == 0:
            start = self._first_start(text, messages, tools)
        else:
            opened = self.render(messages[:number], tools, prompt=True)
            start = self._after_header(opened, text, messages, number, tools)
            if start < len(opened) and not text.startswith(self.render(messages[:number], tools)):
                raise _not_appended(number)
        if number == len(messages) - 1:
            return start, len(text)
        closed = self.render(messages[: number + 1], tools)
        for ended in (closed, closed.removesuffix(self.special_tokens.get("eos_token", ""))):
            if text.startswith(ended):
                return start, len(ended)
        _, reasoned, said = closed[start:].rpartition(_END_OF_REASONING)
        rest = text[start:].lstrip()
        if not reasoned or not closed.startswith(text[:start]) or not rest.startswith(said.lstrip()):
            raise _not_appended(number)
        return start, len(text) - len(rest) + len(said.lstrip())

    def _first_start(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> int:
        """Where the assistant's words start in a conversation that it begins.

        Many templates cannot render no message at all, so that the header is what a prompt adds after the first one.
        """
        alone, asked = (self.render(messages[:1], tools, prompt) for prompt in (False, True))
        header = asked[_common(alone, asked) :]
        if not header:
            try:
                return _common(self.render([], tools), text)
            except jinja2.TemplateError:  # it looks at the first message before it says anything
                return 0
        # Of a header that opens a reasoning the conversation may have the first line alone.
        place = text.find(header.splitlines(keepends=True)[0])
        if place < 0:
            raise DataError(
                "field 'messages' must begin with a turn that the tokenizer's chat template begins as a prompt ends, "
                "got the assistant's with another beginning; put a user's turn before it, or mark the "
                "assistant's words in the template with {% generation %} and {% endgeneration %}"
            )
        return self._after_header(text[:place] + header, text, messages, 0, tools)

    def _after_header(
        self, opened: str, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> int:
        """Where the words of `messages[number]` begin in `text`; the prompt for them is `opened`.

        A prompt may continue with text that the conversation does not have, e.g. the beginning of a reasoning, and the
        words may begin like it: ``<b>`` like ``<think>``. The same conversation with other words tells the two apart.
        """
        end = _common(opened, text)
        if end == len(opened):
            return end
        other = [*messages[:number], {**messages[number], "content": _OTHER_WORDS}, *messages[number + 1 :]]
        certain = min(end, _common(opened, self.render(other, tools)))
        shared = _WHOLE_TAGS.match(text, certain, end)
        assert shared is not None, "it matches nothing, too"
        return shared.end()


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), len(other))


def _not_appended(number: int) -> DataError:
    return DataError(
        f"field 'messages' must be rendered in order by the tokenizer's chat template, got a template that changes "
        f"what surrounds the assistant's messages[{number}] when more messages follow; mark the "
        "assistant's words in the template with {% generation %} and {% endgeneration %}"
    )


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """A rendering without its marks, and where they were."""
    parts, spans, length = [], [], 0
    for number, piece in enumerate(marked.split(_START)):
        said, _, rest = piece.partition(_END) if number else ("", "", piece)
        if number:
            spans.append((length, length + len(said)))
        parts += [said, rest]
        length += len(said) + len(rest)
    return "".join(parts), spans


def _spoken(spans: list[Span], turns: list[int], silent: Collection[int]) -> list[Span]:
    """Of what a template marks, what is said in turns that are not silent."""
    if silent and len(spans) != len(turns):
        raise DataError(
            f"a chat with a turn without loss must suit a chat template that marks each assistant's turn once, got "
            f"{len(spans)} marks for {len(turns)} turns; remove {' and '.join(LOSS_FLAGS)} from its "
            "messages, or fix the template"
        )
    spoken = [span for span, turn in zip(spans, turns, strict=True) if turn not in silent] if silent else spans
    return [(start, end) for start, end in spoken if end > start]


def is_silent(message: Message, name: str) -> bool:
    """Whether a message asks for no loss on what the assistant says in it, by `weight` 0 or `train` false.

    Args:
        message: with its `role`.
        name: what an error calls it.
    Raises:
        DataError: another value, or a loss on a turn that is not the assistant's.
    """
    flags = {flag: message[flag] for flag in LOSS_FLAGS if flag in message}
    for flag, value in flags.items():
        rule = "0 or 1" if flag == "weight" else "true or false"
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise DataError(f"field '{name}.{flag}' must be {rule}, got {value!r}; fix the record")
        if value and message["role"] != ASSISTANT:
            raise DataError(
                f"field '{name}.{flag}' must be left out or {rule.split(' or ')[flag == 'train']} in a turn of "
                f"{message['role']}, got {value!r}; only what the assistant says is learnt"
            )
    return message["role"] == ASSISTANT and not all(flags.values())


class _Generation(Extension):
    """The tag ``{% generation %}`` … ``{% endgeneration %}``."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_END}"


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """A template ready to render, in the surroundings that transformers documents for chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": TEMPLATE_DATE.strftime,
    }
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON as models are prompted with: neither HTML nor Unicode escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def chat_templates(value: Any) -> dict[str, str] | None:
    """`chat_template` of a tokenizer_config.json, a text or a list of named ones, by name; None without a default.

    Args:
        value: as JSON has it; None for no template.
    Raises:
        DataError: it is neither.
    """
    if isinstance(value, list):
        for number, entry in enumerate(value):
            if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
                raise DataError(
                    f"chat_template[{number}] must be an object with a name and a template, both strings, got "
                    f"{repr(entry)[:40]}; fix it"
                )
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, str):
        value = {"default": value}
    if value is not None and not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        raise DataError(f"chat_template must be a string or a list of named ones, got {repr(value)[:40]}; fix it")
    return value if value and "default" in value else None
