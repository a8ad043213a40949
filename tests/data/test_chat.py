"""Masks of the assistant's turns, against tables made by hand and against transformers and TRL's templates."""

import json
import pickle

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ms_varlen.data.sources.record import Record
from ms_varlen.data.tokens.chat import ChatTemplate, chat_templates
from ms_varlen.data.tokens.records import RecordEncoder
from ms_varlen.data.tokens.tokenizers import open_tokenizer
from ms_varlen.errors import DataError, located

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# Like Qwen's: tools in the system's turn, tool answers as a user's turn, reasoning kept in the last turn only.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
TAGGED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
"""
# The system's words come last, and the first message is counted from the end.
MOVING = (
    "{% for message in messages if message['role'] != 'system' %}{{ loop.revindex ~ message['role'] + ': ' + "
    "message['content'] + '\\n' }}{% endfor %}{% for message in messages if message['role'] == 'system' %}"
    "{{ message['content'] }}{% endfor %}"
)


def said(source, messages, tools=None, **special):
    """The rendering with the assistant's words in brackets."""
    with located("c.jsonl line 3"):
        text, spans = ChatTemplate({"default": source}, special).conversation(messages, tools)
    for start, end in reversed(spans):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    return text


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def test_chatml_by_hand():
    assert said(CHATML, chat("sBe short.", "uHi", "aHello", "uBye", "aSo long")) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "[Hello<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|im_end|>\n]"
    )


def test_llama3_by_hand():
    assert said(LLAMA3, chat("sBe short.", "uHi", "a Hello \n", "uBye", "aSo long"), bos_token="<|begin|>") == (
        "<|begin|><|start_header_id|>system<|end_header_id|>\n\nBe short.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[So long<|eot_id|>]"
    )


def test_qwen_with_tools_by_hand():
    call = {"function": {"name": "add", "arguments": {"a": 1, "ü": "<"}}}
    messages = [
        *chat("sBe short.", "u1 + 1?"),
        {"role": "assistant", "tool_calls": [call]},
        *chat("t2", "tfast", "a<think>\neasy\n</think>\n\nTwo"),
    ]
    assert said(QWEN, messages, tools=[{"name": "add"}]) == (
        '<|im_start|>system\nBe short.\n\n<tools>\n{"name": "add"}\n</tools><|im_end|>\n'
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n[\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "ü": "<"}}\n</tool_call>'
        "<|im_end|>\n]<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\nfast\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n[<think>\neasy\n</think>\n\nTwo<|im_end|>\n]"
    )


def test_reasoning_that_a_template_leaves_out_of_earlier_turns_is_no_fault():
    thinking = chat("uHi", "a<think>\nlong\n</think>\n\nHello", "uBye", "a<think>\nshort\n</think>\n\nSo long")
    assert said(QWEN, thinking) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[<think>\nshort\n</think>\n\nSo long<|im_end|>\n]"
    )


def test_a_prompt_that_opens_a_reasoning_is_no_target():
    opening = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    assert said(opening, chat("uHi", "a<think>\neasy</think>Hello", "uBye", "aSo long")) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n[easy</think>Hello<|im_end|>\n]"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[So long<|im_end|>\n]"
    )


@pytest.mark.parametrize("begun", ["<think>\n", "<think>\n\n</think>\n\n", "[THINK]", "Thinking: "])
@pytest.mark.parametrize("words", ["<b>four</b>", "<tool_call>4", "<", "[4]", "Three and one", "four"])
def test_words_that_begin_like_the_rest_of_a_prompt_are_targets(begun, words):
    opening = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n' + begun }}{% endif")
    spoken = f"<|im_start|>assistant\n[{words}<|im_end|>\n]"
    asked = "<|im_start|>user\n2 + 2?<|im_end|>\n"
    turns = chat("u2 + 2?", "a" + words, "u2 + 2?", "a" + words)
    assert said(opening, turns, begun=begun) == asked + spoken + asked + spoken
    assert said(opening, turns[1:], begun=begun) == spoken + asked + spoken


def test_an_end_of_text_after_the_last_turn_only_belongs_to_it():
    source = CHATML.replace(
        "{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{{ eos_token }}{% else %}"
    )
    assert said(source, chat("uHi", "aHello", "uBye", "aSo long"), eos_token="</s>") == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[So long<|im_end|>\n</s>]"
    )


def test_an_end_of_text_after_every_turn_is_a_target():
    source = (
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + "
        "' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
    )
    assert said(source, chat("uHi", "aHello", "uBye", "aSo long"), bos_token="<s>", eos_token="</s>") == (
        "<s>[INST] Hi [/INST][ Hello</s>][INST] Bye [/INST][ So long</s>]"
    )


def test_empty_content_leaves_the_mark_of_its_end():
    assert said(CHATML, chat("u", "a")) == ("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n[<|im_end|>\n]")


def test_a_chat_without_the_assistant_has_no_target():
    assert said(CHATML, chat("sBe short.", "uHi")) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def test_a_template_without_a_prompt_makes_the_header_a_target():
    source = CHATML.split("{% if add")[0]
    assert (
        said(source, chat("uHi", "aHello"))
        == "<|im_start|>user\nHi<|im_end|>\n[<|im_start|>assistant\nHello<|im_end|>\n]"
    )


def test_generation_marks_say_it_all():
    assert said(TAGGED, chat("uHi", "aHello", "aand", "uBye", "a")) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>]\n<|im_start|>assistant\n"
        "[and<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[<|im_end|>]\n"
    )


@pytest.mark.parametrize("turns", [("sBe short.", "uHi", "aHello"), ("uHi", "aHello", "uBye", "aSo long")])
def test_a_template_that_moves_things_around_is_refused(turns):
    message = (
        r"field 'messages' must be rendered in order by the tokenizer's chat template, got a template that changes "
        r"what surrounds the assistant's messages\[\d\] when more messages follow, in c.jsonl line 3; mark the "
        r"assistant's words in the template with {% generation %} and {% endgeneration %}"
    )
    with pytest.raises(DataError, match=message):
        said(MOVING, chat(*turns))


def test_what_a_template_says_against_a_chat_is_passed_on():
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('A user must begin') }}{% endif %}" + CHATML
    assert said(strict, chat("uHi")) == "<|im_start|>user\nHi<|im_end|>\n"
    with pytest.raises(
        DataError, match=r"template, which says TemplateError: A user must begin, in c.jsonl line 3; fix the record"
    ):
        said(strict, chat("sHi"))
    with pytest.raises(DataError, match=r"template, which says .* has no attribute 'name', in c.jsonl line 3"):
        said("{{ messages[0].name + '' }}", chat("uHi"))
    with pytest.raises(DataError, match=r"template, which says SecurityError: access to attribute '__class__'"):
        said("{{ messages.__class__.__mro__ }}", chat("uHi"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError: Range too big.*"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: maximum recursion .*"),
        ("{{ messages[0].content.split('') }}", "ValueError: empty separator"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError: .*"),
        ("{% if %}", "TemplateSyntaxError: .*"),
    ],
)
def test_whatever_a_template_raises_names_the_record(source, found):
    with pytest.raises(DataError, match=rf"which says {found}, in c.jsonl line 3; fix the record or the") as raised:
        said(source, chat("uHi"))
    assert "\n" not in str(raised.value)


def test_a_chat_may_begin_with_the_assistant():
    begun = chat("aHello", "uBye", "aSo long")
    rest = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    assert said(CHATML, begun) == f"<|im_start|>assistant\n[Hello<|im_end|>\n]{rest}[So long<|im_end|>\n]"
    assert said(QWEN, begun) == (
        f"<|im_start|>assistant\n[Hello<|im_end|>\n]{rest}[<think>\n\n</think>\n\nSo long<|im_end|>\n]"
    )
    assert said(QWEN, begun[:1]) == "<|im_start|>assistant\n[<think>\n\n</think>\n\nHello<|im_end|>\n]"
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert said(LLAMA3, begun[:1], bos_token="<|begin|>") == f"<|begin|>{header}[Hello<|eot_id|>]"
    opening = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    assert said(opening, begun[:1]) == "<|im_start|>assistant\n[Hello<|im_end|>\n]"
    silent = "{{ bos_token }}" + CHATML.split("{% if add")[0]
    assert said(silent, begun[:1], bos_token="<s>") == "<s>[<|im_start|>assistant\nHello<|im_end|>\n]"
    other = CHATML.replace("assistant\\n' }}{% endif", "bot\\n' }}{% endif")
    with pytest.raises(DataError, match=r"got the assistant's with another beginning, in c.jsonl line 3; put a user"):
        said(other, begun)


def test_turns_without_loss_are_left_out_of_what_is_marked():
    begun = chat("uHi", "aHello", "uBye", "aSo long")
    assert ChatTemplate({"default": CHATML}, {}).conversation(begun, None, [1])[1] == [
        ChatTemplate({"default": CHATML}, {}).conversation(begun, None)[1][1]
    ]
    text, spans = ChatTemplate({"default": TAGGED}, {}).conversation(begun, None, [3])
    assert [text[start:end] for start, end in spans] == ["Hello<|im_end|>"]
    twice = TAGGED.replace("{%- endgeneration %}", "{%- endgeneration %}{%- generation %}!{%- endgeneration %}")
    with pytest.raises(DataError, match=r"got 4 marks for 2 turns; remove weight and train from"):
        ChatTemplate({"default": twice}, {}).conversation(begun, None, [3])


def test_the_date_does_not_depend_on_the_day():
    assert said("{{ strftime_now('%d %B %Y') }}", chat("uHi")) == "26 July 2024"


def test_several_templates_are_distinguished_by_name():
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = ChatTemplate(chat_templates(both), {})
    assert template.render(chat("uHi")) == "plain"
    assert template.render(chat("uHi"), tools=[{"name": "add"}]) == "with tools"
    assert ChatTemplate(chat_templates("one"), {}).render([]) == "one"
    assert chat_templates(None) is chat_templates(both[1:]) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer like GPT-2's, without merges but for two."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "ĠH", "ĊĊ"])}
    words = Tokenizer(BPE(vocab, [("Ġ", "H"), ("Ċ", "Ċ")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    words.add_special_tokens([AddedToken(name, special=True) for name in names])
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", bos_token="<|begin|>", chat_template=CHATML
    ).save_pretrained(folder)
    return folder


def with_template(folder, tmp_path, source):
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    return open_tokenizer(str(tmp_path))


def encoded(tokenizer, *records):
    encoder = pickle.loads(pickle.dumps(RecordEncoder(tokenizer, "messages")))
    return encoder.encode([Record(fields, f"c.jsonl line {n}", 1.0) for n, fields in enumerate(records, 1)])


def trained(tokenizer, document):
    """The text of a document with what is trained in brackets."""
    text, inside = "", False
    for token, target in zip(document.ids.tolist(), document.supervised.tolist(), strict=True):
        text += ("[" if target and not inside else "]" if inside and not target else "") + tokenizer.id_to_token(token)
        inside = target
    return (text + "]" * inside).replace("Ġ", "_").replace("Ċ", "\n")


def test_a_chat_as_tokens_by_hand(folder):
    tokenizer = open_tokenizer(str(folder))
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    one, two = encoded(tokenizer, {"messages": chat("uHi", "aHello", "uBye", "a Ho")}, {"messages": chat("uHi")})
    assert trained(rust, one) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Hello<|im_end|>\n]<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[_Ho<|im_end|>\n]"
    )
    ids = rust.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n").ids
    assert one.ids[: len(ids)].tolist() == ids
    assert (one.ids.dtype, one.supervised.dtype, one.where) == (np.int32, bool, "c.jsonl line 1")
    assert not two.supervised.any()
    assert (one.empty, one.excerpt) == (False, "user: Hi\nassistant: Hello\nuser: Bye\nassistant:  Ho")


def test_a_token_across_the_boundary_is_a_target(folder, tmp_path):
    tokenizer = with_template(folder, tmp_path, LLAMA3.replace("\\n\\n", "\\n").replace(" | trim", ""))
    rust = Tokenizer.from_file(str(folder / "tokenizer.json"))
    document = encoded(tokenizer, {"messages": chat("uHi", "a\n\nHo")})[0]
    assert trained(rust, document).endswith("<|start_header_id|>assistant<|end_header_id|>[\n\n\nHo<|eot_id|>]")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "chat_template must be a string or a list of named ones, got 5"),
        ([{"template": "a"}], r"chat_template\[0\] must be an object with a name and a template, both strings, got {"),
        (["a"], r"chat_template\[0\] must be an object with a name and a template, both strings, got 'a'"),
        ({"default": 3}, "chat_template must be a string or a list of named ones, got {"),
    ],
)
def test_a_wrong_chat_template_is_named(folder, tmp_path, value, message):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"chat_template": value}))
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=rf"{message}.*, in .*tokenizer_config.json; fix it"):
            open_tokenizer(str(tokenizer))


def test_a_chat_template_that_is_not_unicode_is_named(folder, tmp_path):
    with_template(folder, tmp_path, CHATML)
    (tmp_path / "chat_template.jinja").write_bytes("ü".encode("latin-1"))
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(DataError, match=r"a chat template must be UTF-8, .* at 0, in .*chat_template.jinja; save"):
            open_tokenizer(str(tokenizer))


CHATS = [
    chat("uHi", "aHello 😀"),
    chat("sBe short.", "uHi", "aHello", "uBye", "a\n\nSo long  "),
    chat("uHi", "a", "uGrüße", "aäöü"),
    chat("uHi"),
]


@pytest.mark.parametrize("source", [TAGGED, TAGGED.replace("generation %}", "generation -%}")])
def test_tagged_templates_give_the_masks_of_transformers(folder, tmp_path, source):
    tokenizer = with_template(folder, tmp_path, source)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for messages, document in zip(CHATS, encoded(tokenizer, *({"messages": m} for m in CHATS)), strict=True):
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert document.ids.tolist() == expected["input_ids"]
        assert document.supervised.tolist() == [bool(bit) for bit in expected["assistant_masks"]]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, QWEN, MOVING])
def test_renderings_match_transformers(folder, source):
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, chat_template=source)
    ours = ChatTemplate({"default": source}, {"bos_token": "<|begin|>"})
    for messages in CHATS:
        for prompt in (False, True):
            assert ours.render(messages, prompt=prompt) == theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
    tools = [{"type": "function", "function": {"name": "ä<", "parameters": {}}}]
    assert ours.render(CHATS[0], tools) == theirs.apply_chat_template(CHATS[0], tools, tokenize=False)


def test_marks_around_what_follows_the_prompt_change_nothing():
    words = "message['content'] + '<|im_end|>\\n' }}"
    marked = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\\n' + " + words,
        "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{% generation %}{{ "
        + words
        + "{% endgeneration %}{% else %}{{ "
        + words
        + "{% endif %}",
    )
    assert "{% generation %}" in marked
    for messages in CHATS:
        assert said(marked, messages) == said(CHATML, messages)


def test_tools_may_be_json_text(folder, tmp_path):
    tokenizer = with_template(folder, tmp_path, QWEN)
    tools = [{"name": "add"}]
    records = [{"messages": chat("uHi", "aHo"), "tools": value} for value in (tools, json.dumps(tools), None)]
    one, two, without = encoded(tokenizer, *records)
    assert one.ids.tolist() == two.ids.tolist() != without.ids.tolist()
    with pytest.raises(DataError, match=r"field 'tools' must be JSON, got .*, in c.jsonl line 1; fix the record"):
        encoded(tokenizer, {"messages": chat("uHi"), "tools": "{"})
    with pytest.raises(DataError, match=r"field 'tools' must be a list of JSON schemas, got dict, in c.jsonl line 1"):
        encoded(tokenizer, {"messages": chat("uHi"), "tools": {}})
