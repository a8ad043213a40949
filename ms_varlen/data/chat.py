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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ms_varlen.errors import DataError

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
TEMPLATE_DATE = datetime.datetime(2024, 7, 26)  # what Llama 3.2's template says where it is given no clock
TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools, where a tokenizer has several."""

_TAGGED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Around what {% generation %} encloses, in a rendering; Unicode keeps these code points out of text.
_START, _END = "\ufdd0generation\ufdd1", "\ufdd1generation\ufdd0"
_END_OF_REASONING = "</think>"

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
        self, messages: Sequence[Message], tools: Sequence[Any] | None, where: str
    ) -> tuple[str, list[Span]]:
        """The text of a conversation and what of it the assistant says, in order.

        Raises:
            DataError: the template refuses the conversation, or renders the part before an assistant's turn otherwise
                when the turn follows.
        """
        try:
            if _TAGGED.search(self._source(tools)):
                return _unmarked(self._marked(messages, tools, False))
            text = self.render(messages, tools)
            turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
            return text, [self._turn(text, messages, number, tools, where) for number in turns]
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: a template adds text to a missing field
            raise DataError(
                f"field 'messages' must suit the tokenizer's chat template, which says {error}, in {where}; "
                "mend the record or the template"
            ) from error

    def _source(self, tools: Sequence[Any] | None) -> str:
        return self.sources.get(TOOL_TEMPLATE, self.sources["default"]) if tools else self.sources["default"]

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> str:
        return _compiled(self._source(tools)).render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self.special_tokens
        )

    def _turn(
        self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any] | None, where: str
    ) -> Span:
        """Where the assistant's turn `messages[number]` lies in the whole conversation's `text`."""
        opened = self.render(messages[:number], tools, prompt=True)
        start = _common(opened, text)
        # A prompt may go on with what the conversation does not have, e.g. the beginning of a reasoning.
        if start < len(opened) and not text.startswith(self.render(messages[:number], tools)):
            raise _not_appended(number, where)
        if number == len(messages) - 1:
            return start, len(text)
        closed = self.render(messages[: number + 1], tools)
        for ended in (closed, closed.removesuffix(self.special_tokens.get("eos_token", ""))):
            if text.startswith(ended):
                return start, len(ended)
        _, reasoned, said = closed[start:].rpartition(_END_OF_REASONING)
        rest = text[start:].lstrip()
        if not reasoned or not closed.startswith(text[:start]) or not rest.startswith(said.lstrip()):
            raise _not_appended(number, where)
        return start, len(text) - len(rest) + len(said.lstrip())


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), len(other))


def _not_appended(number: int, where: str) -> DataError:
    return DataError(
        f"field 'messages' must be rendered in order by the tokenizer's chat template, got a template that changes "
        f"what surrounds the assistant's messages[{number}] when more messages follow, in {where}; mark the "
        "assistant's words in the template with {% generation %} and {% endgeneration %}"
    )


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """A rendering without its marks, and where they were."""
    parts, spans, length = [], [], 0
    for number, piece in enumerate(marked.split(_START)):
        said, _, rest = piece.partition(_END) if number else ("", "", piece)
        if said:
            spans.append((length, length + len(said)))
        parts += [said, rest]
        length += len(said) + len(rest)
    return "".join(parts), spans


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
    """`chat_template` of a tokenizer_config.json, a text or a list of named ones, by name; None without a default."""
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, str):
        value = {"default": value}
    return value if value and "default" in value else None
