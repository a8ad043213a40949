import pickle

import numpy as np
import pytest

from ms_varlen.data.sources.record import FIELDS, LOSS_FIELDS, Record, masks_of
from ms_varlen.data.tokens.chat import ChatTemplate
from ms_varlen.data.tokens.ready_tokens import tokens_of
from ms_varlen.data.tokens.records import RecordEncoder, find_kind, kind_sentence
from ms_varlen.data.tokens.tokenizers import ByteTokenizer
from ms_varlen.errors import DataError

CHATML = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


class ChattingBytes(ByteTokenizer):
    """Bytes with a chat template."""

    chat_template = ChatTemplate({"default": CHATML}, {})


def records(*fields):
    return [Record(entry, f"c.jsonl line {number}", 1.0) for number, entry in enumerate(fields, 1)]


def encode(kind, *fields, **settings):
    tokenizer = ChattingBytes() if kind == "messages" else ByteTokenizer()
    encoder = RecordEncoder(tokenizer, kind, masks=masks_of(fields[0]), **settings)
    return pickle.loads(pickle.dumps(encoder)).encode(records(*fields))


def shown(document):
    """Text of a document's bytes with targets in brackets; end-of-text is a $."""
    text, inside = b"", False
    mask = np.ones(document.ids.size, bool) if document.supervised is None else document.supervised
    for token, target in zip(document.ids.tolist(), mask.tolist(), strict=True):
        text += (b"[" if target and not inside else b"]" if inside and not target else b"") + bytes(
            [token if token < 256 else ord("$")]
        )
        inside = target
    return (text + b"]" * inside).decode()


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"text": "a", "id": 3}, "text"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "a"}, "completion"),
        ({"messages": [], "prompt": "a"}, "messages"),
        ({"input_ids": [1], "text": "a"}, "tokens"),
        ({"messages": None, "text": "a"}, "text"),
        ({"messages": None, "text": None}, "messages"),
    ],
)
def test_the_kind_is_found_by_its_fields(fields, kind):
    assert find_kind(records(fields)[0]) == kind
    texts = ("messages", "input_ids", "prompt", "completion", "text")
    masks = ("attention_mask", "labels", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask")
    assert (*texts, *masks, "tools") == FIELDS


@pytest.mark.parametrize(("fields", "found"), [({"content": "a", "id": 3}, "fields content, id"), ({}, "no field")])
def test_a_record_of_no_kind_is_named(fields, found):
    message = (
        f"a record must have field 'text', 'messages', 'input_ids' or 'prompt' and 'completion', got {found}, in "
        "c.jsonl line 1; rename the field that holds the text"
    )
    with pytest.raises(DataError, match=message):
        find_kind(records(fields)[0])


def test_the_kind_is_reported_with_what_becomes_of_special_tokens():
    record = records({"text": "a", "prompt": "b", "id": 3})[0]
    assert kind_sentence("text", record, ByteTokenizer()) == (
        "records are text, found in c.jsonl line 1 (also prompt): plain text, loss on every token; end-of-text: 256, "
        "appended to every document; beginning-of-text: none; pad: 257"
    )
    record = records({"messages": []})[0]
    assert kind_sentence("messages", record, ByteTokenizer()) == (
        "records are messages, found in c.jsonl line 1: chats, loss on the assistant's turns; special tokens are those "
        "of the chat template; pad: 257"
    )


def test_texts():
    one, two = encode("text", {"text": "aü"}, {"text": " \n"})
    assert [shown(one), shown(two)] == ["[aü$]", "[ \n$]"]
    assert (one.supervised, one.where, one.excerpt, one.control) == (None, "c.jsonl line 1", "aü", 0)
    assert (one.empty, two.empty, one.ids.dtype) == (False, True, np.int32)


def test_completions():
    found = encode(
        "completion",
        {"prompt": "ü? ", "completion": "yö"},
        {"prompt": "", "completion": "yes"},
        {"prompt": "a", "completion": ""},
        {"prompt": "a", "completion": " "},
    )
    assert [shown(document) for document in found] == ["ü? [yö$]", "[yes$]", "a$", "a[ $]"]
    assert [document.empty for document in found] == [False, False, True, True]
    assert found[0].excerpt == "ü? yö"


def test_chats():
    turns = [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "ä", "name": None}]
    one, two, three = encode("messages", {"messages": turns}, {"messages": []}, {"messages": turns[:1]})
    assert [shown(document) for document in (one, two, three)] == ["<user>ü.<assistant>[ä.]", "", "<user>ü."]
    assert [document.empty for document in (one, two, three)] == [False, True, False]
    assert one.excerpt == "user: ü\nassistant: ä"


def test_ready_tokens():
    found = [
        encode("tokens", fields)[0]
        for fields in (
            {"input_ids": [97, 98, 99]},
            {"input_ids": [97, 98, 99], "labels": [-100, 98, -100]},
            {"input_ids": [97, 98, 99], "loss_mask": [0, 0, 1], "labels": None},
            {"input_ids": np.array([97, 98], np.uint16), "loss_mask": np.array([True, False])},
            {"input_ids": [], "labels": []},
        )
    ]
    assert [shown(document) for document in found] == ["[abc]", "a[b]c", "ab[c]", "[a]b", ""]
    assert (found[0].supervised, found[0].excerpt, found[4].empty) == (None, "ids 97 98 99", True)
    assert all(document.ids.dtype == np.int32 for document in found)


@pytest.mark.parametrize("field", LOSS_FIELDS)
def test_every_usual_mask_says_where_the_loss_is(field):
    mask = [-100, -100, 99, 100] if field == "labels" else [0, 0, 1, 1]
    assert shown(encode("tokens", {"input_ids": [97, 98, 99, 100], field: mask})[0]) == "ab[cd]"


def test_padding_is_no_part_of_a_sample():
    right, left, none, all_of_it = encode(
        "tokens",
        {"input_ids": [97, 98, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [-100, 98, -100, -100]},
        {"input_ids": [257, 97, 98], "attention_mask": [0, 1, 1], "labels": [257, 97, 98]},
        {"input_ids": [97, 98], "attention_mask": [1, 1], "labels": [97, 98]},
        {"input_ids": [97, 98], "attention_mask": [0, 0], "labels": [97, 98]},
    )
    assert [shown(document) for document in (right, left, none, all_of_it)] == ["a[b]", "[ab]", "[ab]", ""]
    assert all_of_it.empty
    alone = encode("tokens", {"input_ids": [97, 98, 0], "attention_mask": np.array([1, 1, 0])})[0]
    assert (shown(alone), alone.supervised) == ("[ab]", None)
    shifted = {"input_ids": [97, 98, 0, 0], "attention_mask": [1, 1, 0, 0], "labels": [98, 99, -100, -100]}
    assert shown(encode("tokens", shifted, labels_shifted=True)[0]) == "a[bc]"


def test_masks_that_agree_are_one():
    fields = {"input_ids": [97, 98, 99], "labels": [-100, -100, 99], "loss_mask": [1, 0, 1]}
    assert shown(encode("tokens", fields)[0]) == "ab[c]", "the first token is never a target"


@pytest.mark.parametrize("field", ["loss_masks", "special_tokens_mask", "label", "Labels", "loss_weights", "targets"])
def test_a_field_that_looks_like_a_mask_is_refused_by_name(field):
    message = rf"a mask or labels next to input_ids must be called .*, got field '{field}', in c.jsonl line 1; rename"
    with pytest.raises(DataError, match=message):
        encode("tokens", {"input_ids": [1, 2], field: [0, 1]})
    assert shown(encode("tokens", {"input_ids": [97], field: None, "loss": 0.5})[0]) == "[a]"


@pytest.mark.parametrize("field", ["attention_mask", "labels", "loss_mask"])
def test_a_mixture_of_records_with_and_without_a_mask_is_refused(field):
    with_it, without = {"input_ids": [1, 1], field: [1, 1]}, {"input_ids": [1, 1]}
    for lacking, found in ((without, "none"), ({**without, field: None}, "null")):
        message = rf"field '{field}' must be there in every record of a source whose first has it, got {found}, in "
        with pytest.raises(DataError, match=message + r"c.jsonl line 2; a mixture would learn all of this one"):
            encode("tokens", with_it, lacking)
        message = rf"field '{field}' must be left out in a source whose first record has none, got one, in c.jsonl "
        with pytest.raises(DataError, match=message + "line 2; add it to every record"):
            encode("tokens", lacking, with_it)


def test_what_is_used_and_what_is_ignored_is_reported():
    fields = {"input_ids": [1], "labels": None, "completion_mask": [1], "attention_mask": [1], "id": 3}
    assert kind_sentence("tokens", Record(fields, "a.parquet row 0", 1.0, ("text",)), ByteTokenizer()) == (
        "records are tokens, found in a.parquet row 0: ready token ids, loss where labels or a mask say so, else on "
        "every token; loss by completion_mask; fields used: input_ids, attention_mask, completion_mask; ignored: "
        "labels, id, text; nothing is added to the ids; pad: 257"
    )
    assert "; loss on every token; fields used: input_ids; ignored: none; " in kind_sentence(
        "tokens", records({"input_ids": [1]})[0], ByteTokenizer()
    )


@pytest.mark.parametrize("kind", ["text", "completion", "messages"])
def test_labels_shifted_is_of_records_with_labels(kind):
    with pytest.raises(DataError, match=f"data.labels_shifted must be left out for records of kind {kind}, got true; "):
        encode(kind, {}, labels_shifted=True)
    with pytest.raises(
        DataError, match=r"field 'labels' must be there under data.labels_shifted, got none, in c.jsonl"
    ):
        encode("tokens", {"input_ids": [1]}, labels_shifted=True)


def test_turns_without_weight_are_not_learnt():
    def chat(first, second):
        said = [{"role": "assistant", "content": "b"} | first, {"role": "assistant", "content": "c"} | second]
        return {"messages": [TURN, said[0], TURN, said[1]]}

    found = encode(
        "messages",
        chat({"weight": 0}, {"weight": 1}),
        chat({}, {"train": False}),
        chat({"train": True, "weight": None}, {"weight": 1.0}),
        chat({}, {}),
    )
    start, middle = "<user>a.<assistant>", "<user>a.<assistant>"
    assert [shown(document) for document in found] == [
        f"{start}b.{middle}[c.]",
        f"{start}[b.]{middle}c.",
        f"{start}[b.]{middle}[c.]",
        f"{start}[b.]{middle}[c.]",
    ]
    assert found[2].key == found[3].key
    assert len({document.key for document in found}) == 3, "they teach something else"


TURN = {"role": "user", "content": "a"}
WRONG = [
    (
        "text",
        {"content": "a", "id": 3},
        r"field 'text' must be there in every record of kind text, got fields content, id",
    ),
    ("text", {}, "field 'text' must be there in every record of kind text, got no field"),
    ("text", {"text": 3}, "field 'text' must be a string, got int"),
    ("text", {"text": None}, "field 'text' must be there, got null"),
    ("text", {"text": "a\ud800"}, r"field 'text' must be Unicode text, got half a surrogate pair"),
    ("text", {"messages": [TURN]}, "must be there in every record of kind text, got fields messages"),
    ("completion", {"prompt": "a"}, "field 'completion' must be next to 'prompt', got fields prompt"),
    ("completion", {"prompt": "a", "completion": None}, "field 'completion' must be next to 'prompt'"),
    ("completion", {"completion": "a"}, "field 'prompt' must be there in every record of kind completion"),
    ("completion", {"prompt": ["a"], "completion": "b"}, "field 'prompt' must be a string, got list"),
    ("messages", {"text": "a"}, "field 'messages' must be there in every record of kind messages, got fields text"),
    ("messages", {"messages": "a"}, "field 'messages' must be a list of objects with role and content, got str"),
    ("messages", {"messages": ["a"]}, r"field 'messages\[0\]' must be an object with role and content, got str"),
    ("messages", {"messages": [TURN, {"role": "gpt"}]}, r"field 'messages\[1\].role' must be one of system, .*'gpt'"),
    ("messages", {"messages": [{"content": "a"}]}, r"field 'messages\[0\].role' must be one of .*, got None"),
    ("messages", {"messages": [{"role": "user"}]}, r"field 'messages\[0\].content' must be a string, got NoneType"),
    (
        "messages",
        {"messages": [{"role": "assistant", "tool_calls": [], "content": None}]},
        r"field 'messages\[0\].content' must be a string, got NoneType",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": ["a"]}]},
        r"'messages\[0\].content' must be a string, got list",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "\udc00"}]},
        r"'messages\[0\].content' must be Unicode text",
    ),
    (
        "messages",
        {"messages": [{**TURN, "name": "\udc00"}]},
        "field 'messages' must be Unicode text, got half a surrogate pair",
    ),
    ("tokens", {"text": "a"}, "field 'input_ids' must be there in every record of kind tokens, got fields text"),
    ("tokens", {"input_ids": "a"}, "field 'input_ids' must be a list of integers, got str"),
    ("tokens", {"input_ids": [1, 2.5]}, "field 'input_ids' must be a list of integers, got a list with float"),
    ("tokens", {"input_ids": [1, None]}, "field 'input_ids' must be a list of integers, got a list with NoneType"),
    ("tokens", {"input_ids": [True]}, "field 'input_ids' must be a list of integers, got a list with bool"),
    ("tokens", {"input_ids": [[1], [2]]}, "field 'input_ids' must be a list of integers, got an array of 2 axes"),
    ("tokens", {"input_ids": [[1], [2, 3]]}, "field 'input_ids' must be a list of integers, got a list with list"),
    (
        "tokens",
        {"input_ids": [2**70]},
        "field 'input_ids' must be a list of integers, got a list with an integer beyond 64 bits",
    ),
    ("tokens", {"input_ids": [1, 258]}, r"input_ids\[1\] must be from 0 to 257, .* data.tokenizer \(bytes\), got 258"),
    ("tokens", {"input_ids": [1, -1]}, r"input_ids\[1\] must be from 0 to 257, .*, got -1"),
    ("tokens", {"input_ids": [1, 2], "labels": [1]}, r"field 'labels' must be as long as input_ids \(2\), got 1"),
    ("tokens", {"input_ids": [1, 2], "loss_mask": [1, 1, 0]}, r"'loss_mask' must be as long as input_ids \(2\), got 3"),
    ("tokens", {"input_ids": [1, 2], "loss_mask": [1, 2]}, r"loss_mask\[1\] must be 0 or 1, got 2"),
    (
        "tokens",
        {"input_ids": [1, 2], "loss_mask": [0.5, 1]},
        "field 'loss_mask' must be a list of integers, got a list",
    ),
    (
        "tokens",
        {"input_ids": [1, 2], "labels": [1, 2], "loss_mask": [1, 0]},
        "fields that say where the loss is must agree, got others in 'loss_mask' than in 'labels'",
    ),
    (
        "tokens",
        {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
        r"attention_mask\[1\] must be 1 between tokens of the sample, got 0",
    ),
    ("tokens", {"input_ids": [1, 2], "attention_mask": [1]}, "field 'attention_mask' must be as long as input_ids"),
    ("tokens", {"input_ids": [1, True, 3]}, "field 'input_ids' must be a list of integers, got a list with bool"),
    ("tokens", {"input_ids": [1], "labels": [True]}, "field 'labels' must be a list of integers, got a list with bool"),
    ("tokens", {"input_ids": [2**63 + 5]}, r"input_ids\[0\] must be at most 9223372036854775807, got 92.*813"),
    (
        "messages",
        {"messages": [TURN, {"role": "assistant", "content": "b", "weight": 0.5}]},
        r"field 'messages\[1\].weight' must be 0 or 1, got 0.5",
    ),
    (
        "messages",
        {"messages": [TURN, {"role": "assistant", "content": "b", "train": "no"}]},
        r"field 'messages\[1\].train' must be true or false, got 'no'",
    ),
    (
        "messages",
        {"messages": [{**TURN, "weight": 1}]},
        r"field 'messages\[0\].weight' must be left out or 0 in a turn of user, got 1",
    ),
    (
        "messages",
        {"messages": [{**TURN, "train": True}]},
        r"field 'messages\[0\].train' must be left out or false in a turn of user, got True",
    ),
    ("tokens", {"input_ids": [5, 6], "labels": [5, 9]}, r"labels\[1\] must be input_ids\[1\] \(6\) or -100, got 9"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), WRONG)
def test_a_wrong_record_is_named(kind, fields, message):
    good = {
        "text": {"text": "a"},
        "completion": {"prompt": "a", "completion": "b"},
        "messages": {"messages": [TURN]},
        "tokens": {"input_ids": [1]} | {field: [1] for field in masks_of(fields)},
    }[kind]
    with pytest.raises(DataError, match=f"{message}.*, in c.jsonl line 2; "):
        encode(kind, good, fields)


def test_shifted_labels_are_detected_and_never_shifted_twice():
    shifted = {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}
    message = (
        r"field 'labels' must name each token's own id or -100, got labels that are shifted already \(labels\[0\] is 6 "
        r"where input_ids\[0\] is 5\), in c.jsonl line 1; they would be shifted twice: set data.labels_shifted=true"
    )
    with pytest.raises(DataError, match=message):
        encode("tokens", shifted)
    with pytest.raises(DataError, match="shifted already"):  # as MindFormers' handlers write them, a pad id at the end
        encode("tokens", {"input_ids": [5, 6, 7, 8], "labels": [-100, 7, 8, 0]})
    one, two, three = encode(
        "tokens",
        shifted,
        {"input_ids": [5, 6, 7], "labels": [-100, 7, 8]},
        {"input_ids": [], "labels": []},
        labels_shifted=True,
    )
    assert (one.ids.tolist(), one.supervised.tolist()) == ([5, 6, 7, 8], [False, True, True, True])
    assert (two.ids.tolist(), two.supervised.tolist()) == ([5, 6, 7, 8], [False, False, True, True])
    assert (three.ids.size, three.supervised.size) == (0, 0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([5, 6, 7], "must name the next token's id under data.labels_shifted, got each token's own, .*=false"),
        ([6, 9, 8], r"labels\[1\] must be input_ids\[2\] \(7\) or -100, got 9, in c.jsonl line 1; fix"),
        ([6, 7, 300], r"input_ids\[3\] must be from 0 to 257, .*, got 300"),
    ],
)
def test_labels_that_contradict_their_declaration_are_refused(labels, message):
    with pytest.raises(DataError, match=message):
        encode("tokens", {"input_ids": [5, 6, 7], "labels": labels}, labels_shifted=True)


def test_equal_ids_follow_the_usual_convention():
    ids, targets = tokens_of({"input_ids": [5, 5, 5], "labels": [-100, 5, 5]}, False)
    assert (ids.tolist(), targets.tolist()) == ([5, 5, 5], [False, True, True])


@pytest.mark.parametrize(
    ("policy", "expected", "count"),
    [("keep", "a\0\r\n\tb\ufffd\x7f", 3), ("drop", "a\0\r\n\tb\ufffd\x7f", 3), ("remove", "a\r\n\tb", 3)],
)
def test_control_characters(policy, expected, count):
    text = "a\0\r\n\tb\ufffd\x7f"
    document = encode("text", {"text": text}, control_characters=policy)[0]
    assert (shown(document), document.control) == (f"[{expected}$]", count)
    chat = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}
    document = encode("messages", chat, control_characters=policy)[0]
    assert (shown(document), document.control) == (f"<user>{expected}.<assistant>[{expected}.]", 2 * count)
    document = encode("completion", {"prompt": text, "completion": text}, control_characters=policy)[0]
    assert (shown(document), document.control) == (f"{expected}[{expected}$]", 2 * count)
    with pytest.raises(
        DataError,
        match=r"field 'text' must have no control character under data.control_characters=error, got U\+0000 at "
        "character 1, in c.jsonl line 1; fix the text, or set data.control_characters to keep, remove or drop",
    ):
        encode("text", {"text": text}, control_characters="error")


def test_keys_tell_what_records_say_and_not_how():
    texts = encode("text", {"text": "a"}, {"text": "a", "id": 3}, {"text": "b"})
    assert texts[0].key == texts[1].key != texts[2].key
    turns = [{"role": "user", "content": "a", "name": None}, {"content": "b", "role": "assistant"}]
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = encode(
        "messages", {"messages": turns}, {"messages": plain, "tools": None}, {"messages": plain, "tools": []}
    )
    assert chats[0].key == chats[1].key
    pairs = encode("completion", {"prompt": "a", "completion": "bc"}, {"prompt": "ab", "completion": "c"})
    assert pairs[0].key != pairs[1].key
    ids = [1, 2]
    masks = [{}, {"loss_mask": [1, 1]}, {"loss_mask": [0, 1]}, {"labels": ids}, {"loss_mask": [1, 0]}]
    tokens = [encode("tokens", {"input_ids": ids} | mask)[0] for mask in masks]
    assert len({document.key for document in tokens[:4]}) == 1, "the first token is never a target"
    assert tokens[4].key != tokens[0].key
    assert {len(document.key) for document in (*texts, *chats, *pairs, *tokens)} == {8}


def test_keys_and_emptiness_are_of_what_is_left_without_control_characters():
    for policy, same in (("remove", True), ("keep", False)):
        texts = encode("text", {"text": "a"}, {"text": "a\0"}, {"text": "\0\x7f"}, control_characters=policy)
        assert (texts[0].key == texts[1].key, texts[2].empty) == (same, same)
        pairs = [{"prompt": "a", "completion": said} for said in ("b", "b\0", "\0")]
        pairs = encode("completion", *pairs, control_characters=policy)
        assert (pairs[0].key == pairs[1].key, pairs[2].empty) == (same, same)
        chats = [{"messages": [{"role": "user", "content": said}]} for said in ("b", "b\0", "\0")]
        chats = encode("messages", *chats, control_characters=policy)
        assert (chats[0].key == chats[1].key, chats[2].empty) == (same, same)


def test_chats_need_a_template(tmp_path):
    with pytest.raises(
        DataError, match=r"data.tokenizer must have a chat template for records of messages, got none in bytes; use the"
    ):
        RecordEncoder(ByteTokenizer(), "messages")
