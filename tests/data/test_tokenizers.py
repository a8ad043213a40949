import json
import pickle
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ms_varlen.data.sources.record import Record
from ms_varlen.data.tokens.records import RecordEncoder
from ms_varlen.data.tokens.tokenizers import FastTokenizer, describe, open_tokenizer, tokenizer_fingerprint
from ms_varlen.errors import DataError


def test_bytes_end_with_end_of_text():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode("aü").tolist() == [97, 195, 188]
    documents = tokenizer.encode_documents(["aü", ""])
    assert [ids.tolist() for ids in documents] == [[97, 195, 188, 256], [256]]
    assert all(ids.dtype == np.int32 for ids in documents)
    assert describe(tokenizer) == {
        "name": "bytes",
        "vocab_size": 258,
        "eos_id": 256,
        "pad_id": 257,
        "fingerprint": "bytes-256-eos-pad",
        "end_of_text": "256, appended to every document",
        "beginning_of_text": "none",
        "pad": "257",
    }


def words(template=None, special=("</s>",)):
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "<pad>": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    if template:
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 3), ("</s>", 4)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7, pad_id=9, pad_token="<pad>")
    return tokenizer


def word_tokenizer(path, template=None, special=("</s>",)):
    words(template, special).save(str(path))
    return str(path)


def test_a_tokenizer_json_neither_cuts_nor_pads(tmp_path):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (10, 4, 4)
    assert tokenizer.encode("a b a").tolist() == [1, 2, 1]
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a b a", "b", ""])] == [[1, 2, 1, 4], [2, 4], [4]]


def test_end_of_text_inside_and_at_the_end_of_a_text_is_real(tmp_path):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a</s> b", "a</s> b</s>"])] == [
        [1, 4, 2, 4],
        [1, 4, 2, 4, 4],
    ]


@pytest.mark.parametrize(
    ("template", "expected", "end", "beginning"),
    [
        (None, [1, 4], "</s> (4), appended to every document", "none"),
        ("<s> $A", [3, 1, 4], "</s> (4), appended to every document", "<s> (3), added by the tokenizer itself"),
        ("<s> $A </s>", [3, 1, 4], "</s> (4), added by the tokenizer itself", "<s> (3), added by the tokenizer itself"),
        ("$A </s>", [1, 4], "</s> (4), added by the tokenizer itself", "none"),
    ],
)
def test_the_template_is_kept_and_end_of_text_comes_once(tmp_path, template, expected, end, beginning):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json", template))
    assert tokenizer.encode_documents(["a"])[0].tolist() == expected
    assert tokenizer.encode("a").tolist() == [1]
    assert tokenizer.handling == {
        "end_of_text": end,
        "beginning_of_text": beginning,
        "pad": "4, end-of-text: the tokenizer has no pad",
    }


@pytest.mark.parametrize(
    ("template", "ids", "mask"),
    [
        (None, [1, 2, 1, 4], "..xx"),
        ("<s> $A", [3, 1, 2, 1, 4], "...xx"),
        ("<s> $A </s>", [3, 1, 2, 1, 4], "...xx"),
    ],
)
def test_spans_are_targets_and_so_is_the_end(tmp_path, template, ids, mask):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json", template))
    found, marked = tokenizer.encode_spans(["a b a"], [[(3, 5)]], documents=True)[0]
    assert (found.tolist(), "".join(".x"[bit] for bit in marked)) == (ids, mask)
    found, marked = tokenizer.encode_spans(["a b a"], [[(0, 1), (4, 5)]], documents=False)[0]
    assert (found.tolist(), marked.tolist()) == ([1, 2, 1], [True, False, True])
    found, marked = tokenizer.encode_spans(["a b "], [[(3, 4)]], documents=True)[0]
    assert not marked.any(), "a span of white space has no token here"


def byte_level(trim_offsets):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate([*alphabet, "Ġy", "</s>"])}
    tokenizer = Tokenizer(BPE(vocab, [("Ġ", "y")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim_offsets)
    return tokenizer


def completion(tmp_path, tokenizer, prompt, said):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = RecordEncoder(open_tokenizer(str(tmp_path / "tokenizer.json")), "completion")
    document = encoder.encode([Record({"prompt": prompt, "completion": said}, "", 1.0)])[0]
    tokens = [tokenizer.id_to_token(token) for token in document.ids.tolist()]
    return [f"[{token}]" if bit else token for token, bit in zip(tokens, document.supervised, strict=True)]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_completions_of_a_byte_level_tokenizer(tmp_path, trim_offsets):
    tokenizer = byte_level(trim_offsets)
    assert completion(tmp_path, tokenizer, "a?", " yo") == ["a", "?", "[Ġy]", "[o]", "[</s>]"]
    # A token across the boundary says something of the completion.
    assert completion(tmp_path, tokenizer, "a? ", "yo") == ["a", "?", "[Ġy]", "[o]", "[</s>]"]
    # A character of several tokens, at the end and at the beginning.
    assert completion(tmp_path, tokenizer, "ü", "😀") == ["Ã", "¼", "[ð]", "[Ł]", "[ĺ]", "[Ģ]", "[</s>]"]


def test_completions_of_a_tokenizer_that_marks_words(tmp_path):
    vocab = ["<unk>", "</s>", "▁", *"ab?", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "a"), ("▁", "b")]
    model = BPE({token: number for number, token in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert completion(tmp_path, tokenizer, "a?", " b") == ["▁a", "?", "[▁b]", "[</s>]"]
    assert completion(tmp_path, tokenizer, "a", "b") == ["▁a", "[b]", "[</s>]"]
    assert completion(tmp_path, tokenizer, "", "b") == ["[▁b]", "[</s>]"]
    assert completion(tmp_path, tokenizer, "é", "ü") == ["▁", "<0xC3>", "<0xA9>", "[<0xC3>]", "[<0xBC>]", "[</s>]"]


@given(st.data(), st.text("aü😀 \n", max_size=12), st.booleans())
def test_targets_are_the_tokens_that_overlap_a_span(data, text, trim_offsets):
    rust = byte_level(trim_offsets)
    tokenizer = FastTokenizer(byte_level(trim_offsets), "name", "", {}, None, Path())
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    ids, mask = tokenizer.encode_spans([text], [spans], documents=False)[0]
    encoding = rust.encode(text)
    assert ids.tolist() == encoding.ids
    for (start, stop), target in zip(encoding.offsets, mask.tolist(), strict=True):
        inside = any(start < last and first < stop for first, last in spans)
        around = any(first < start and stop < last for first, last in spans)  # space that the offsets leave out
        assert target == (inside or (start == stop and target and around))
    assert tokenizer.encode_documents([text])[0].tolist() == [*encoding.ids, tokenizer.eos_id]


def test_offsets_are_those_of_the_text_before_it_is_normalised(tmp_path):
    tokenizer = byte_level(False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Replace("a", "bcd")])
    assert completion(tmp_path, tokenizer, "éa", "xé") == [
        *("e", "Ì", "ģ", "b", "c", "d"),
        *("[x]", "[e]", "[Ì]", "[ģ]", "[</s>]"),
    ]


def test_tokenizer_config_decides_the_special_ids(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    guessed = open_tokenizer(path).fingerprint
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(
        json.dumps({"eos_token": {"content": "b"}, "pad_token": "<pad>", "chat_template": "{{ pad_token }}"})
    )
    tokenizer = open_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 9)
    assert tokenizer.handling["pad"] == "<pad> (9)"
    assert tokenizer.chat_template.render([]) == "<pad>"
    assert tokenizer.fingerprint != guessed
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert open_tokenizer(path).chat_template.render([]) == "b"
    settings.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(
        DataError, match=r"eos_token must be in the vocabulary, got '<none>', in .*tokenizer.json; fix or remove"
    ):
        open_tokenizer(path)
    for content, found in (("{", "must be JSON"), ("[]", "must be a JSON object, got list")):
        settings.write_text(content)
        with pytest.raises(DataError, match=found):
            open_tokenizer(path)


def test_without_end_of_text_nothing_is_appended(tmp_path):
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.chat_template) == (None, 0, None)
    assert tokenizer.encode_documents(["a"])[0].tolist() == [0]
    assert tokenizer.handling == {
        "end_of_text": "none: documents end without a mark",
        "beginning_of_text": "none",
        "pad": "0, the first id: the tokenizer has no pad",
    }


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data.tokenizer must be a tokenizer.json, got .*, in .*tokenizer.json"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    Tokenizer(WordLevel({}, unk_token="a")).save(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match=r"data.tokenizer must have a vocabulary"):
        open_tokenizer(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match=r"data.tokenizer must be an existing file or folder, got .*none.json"):
        open_tokenizer(str(tmp_path / "none.json"))


@pytest.fixture
def folder(tmp_path):
    """A model's folder as transformers saves it, weights next to."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=words("<s> $A"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{{ bos_token }}",
    )
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "model"


def test_a_transformers_folder_gives_what_transformers_gives(folder):
    tokenizer, theirs = open_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    texts = ["a b a", "", "b</s> a"]
    assert [ids.tolist() for ids in tokenizer.encode_documents(texts)] == [
        [*ids, theirs.eos_token_id] for ids in theirs(texts, truncation=False, padding=False)["input_ids"]
    ]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size, tokenizer.name) == (4, 9, 10, "model")
    assert tokenizer.handling == {
        "end_of_text": "</s> (4), appended to every document",
        "beginning_of_text": "<s> (3), added by the tokenizer itself",
        "pad": "<pad> (9)",
    }
    assert tokenizer.chat_template.render([]) == "<s>"
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode_documents(["a b"])[0].tolist() == [3, 1, 2, 4]


def test_the_fingerprint_is_of_the_files_that_decide(folder, tmp_path):
    before = tokenizer_fingerprint(str(folder))
    assert open_tokenizer(str(folder)).fingerprint == before
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "config.json").write_text("{}")
    moved = folder.rename(tmp_path / "moved")
    assert tokenizer_fingerprint(str(moved)) == before
    found = {before}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        content = (moved / name).read_bytes()
        (moved / name).write_bytes(content + b" ")
        found.add(tokenizer_fingerprint(str(moved)))
        (moved / name).write_bytes(content)
    assert len(found) == 5


def test_a_folder_with_a_tokenizer_json_alone_is_that_file(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    assert open_tokenizer(str(tmp_path)).encode_documents(["a"])[0].tolist() == [1, 4]
    assert open_tokenizer(str(tmp_path)).handling == open_tokenizer(path).handling


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "nothing known"}')
    with pytest.raises(
        DataError, match=r"data.tokenizer must be a folder that transformers' AutoTokenizer opens, got .*, in .*; give"
    ) as raised:
        open_tokenizer(str(tmp_path))
    assert "albert" not in str(raised.value).lower(), "the list of all that transformers knows"


def test_a_folder_with_a_special_token_of_a_wrong_type_is_named(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"eos_token": {"content": 5}}))
    with pytest.raises(DataError, match=r"AutoTokenizer opens, got .*eos_token.*, in .*; give"):
        open_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_fast_form_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    (tmp_path / "vocab.json").write_text('{"a": 0, "<unk>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(DataError, match=r"data.tokenizer must have a fast form, got CTRLTokenizer, in .*; convert it"):
        open_tokenizer(str(tmp_path))


def test_a_folder_says_when_transformers_is_missing(folder, monkeypatch):
    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nothing)
    message = r"must have the packages that its folder needs, got .*transformers, in .*model; install transformers"
    with pytest.raises(DataError, match=message):
        tokenizer_fingerprint(str(folder))
    assert tokenizer_fingerprint(str(folder / "tokenizer.json"))
