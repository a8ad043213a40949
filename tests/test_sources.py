import json
import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ms_varlen.data.config import DataConfig, LognormalLengths, missing_files, store_root
from ms_varlen.data.sources import JsonLinesSource, LognormalSource, PydocSource, open_source
from ms_varlen.data.tokenizers import ByteTokenizer, open_tokenizer
from ms_varlen.errors import DataError


def texts(source):
    return [document.text for document in source]


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def library(tmp_path):
    """A small standard library with everything that has to be left out or counted."""
    root = tmp_path / "lib"
    write(
        root / "b.py",
        b'"""Module b."""\ndef f():\n    """Said twice."""\nclass C:\n    """Class."""\n    def g(self): pass\n',
    )
    write(root / "a.py", b'async def h():\n    """Said twice."""\nif True:\n    def k():\n        """Nested."""\n')
    write(root / "pkg" / "c.py", '"""Grüße."""\nx = "\\d"\n'.encode())
    write(root / "pkg" / "broken.py", b"def (:\n")
    write(root / "pkg" / "latin.py", b'"""\xe9"""\n')
    write(root / "pkg" / "half.py", b'"""\\ud800"""\n')
    write(root / "notes.txt", b"not Python")
    for left_out in ("site-packages", "test", "pkg/tests", "idlelib"):
        write(root / left_out / "d.py", b'"""Left out."""\n')
    return root


def test_pydoc_gives_distinct_docstrings_in_a_fixed_order(library):
    source = PydocSource(library)
    expected = ["Said twice.", "Nested.", "Module b.", "Class.", "Grüße."]
    assert [(d.text, d.where) for d in source] == list(
        zip(expected, ["a.py", "a.py", "b.py", "b.py", "pkg/c.py"], strict=True)
    )
    assert source.skipped == {"unparsed_files": 2, "unencodable_docstrings": 1}
    assert texts(source) == expected, "a second iteration starts anew"
    assert source.skipped == {"unparsed_files": 2, "unencodable_docstrings": 1}


def test_pydoc_fingerprint_follows_content_and_not_place(library, tmp_path):
    before = PydocSource(library).fingerprint()
    moved = library.rename(tmp_path / "elsewhere")
    assert PydocSource(moved).fingerprint() == before
    write(moved / "test" / "d.py", b'"""Still left out."""\n')
    assert PydocSource(moved).fingerprint() == before
    write(moved / "a.py", b'"""Other."""\n')
    assert PydocSource(moved).fingerprint() != before


def test_pydoc_reads_the_running_library():
    assert next(iter(open_source("pydoc"))).done > 0


def test_json_lines_give_text_place_and_share(tmp_path):
    path = write(
        tmp_path / "c.jsonl", b'\xef\xbb\xbf{"text": "a"}\n\n{"id": 1, "text": "\\u00fc\\u2028"}\r\n{"text": ""}'
    )
    source = JsonLinesSource(path)
    found = list(source)
    assert [d.text for d in found] == ["a", "ü\u2028", ""]
    assert [d.where for d in found] == [f"{path} line 1", f"{path} line 3", f"{path} line 4"]
    assert found[-1].done == 1.0
    assert source.skipped == {"blank_lines": 1}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a line must be a JSON object, got Expecting .*, in .*c.jsonl line 2; mend"),
        (b'["a"]', r"a line must be a JSON object, got list, in .*c.jsonl line 2"),
        (b"[" * 100_000, r"a line must be a JSON object, got .*, in .*c.jsonl line 2"),
        (b'{"content": "a", "id": 3}', r"field 'text' must be there, got content, id, in .*c.jsonl line 2; rename"),
        (b"{}", r"field 'text' must be there, got no field, in .*c.jsonl line 2"),
        (b'{"text": 3}', r"field 'text' must be a string, got int, in .*c.jsonl line 2"),
        (b'{"text": null}', r"field 'text' must be a string, got NoneType, in .*c.jsonl line 2"),
        (b'{"text": "\xff"}', r"a line must be UTF-8, got byte 0xff at byte 10, in .*c.jsonl line 2; save"),
        (b'{"text": "\\ud800"}', r"field 'text' must be Unicode text, got half a surrogate pair, in .*c.jsonl line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "c.jsonl", b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(JsonLinesSource(path))


def test_json_lines_fingerprint_is_the_content(tmp_path):
    one = JsonLinesSource(write(tmp_path / "one.jsonl", b'{"text": "a"}\n'))
    two = JsonLinesSource(write(tmp_path / "two.jsonl", b'{"text": "a"}\n'))
    assert one.fingerprint() == two.fingerprint()
    write(two.path, b'{"text": "b"}\n')
    assert one.fingerprint() != two.fingerprint()


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data.source must be an existing, readable file, got .*none.jsonl"):
        open_source(str(tmp_path / "none.jsonl"))


def test_bytes_end_with_end_of_text():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode("aü").tolist() == [97, 195, 188]
    documents = tokenizer.encode_documents(["aü", ""])
    assert [ids.tolist() for ids in documents] == [[97, 195, 188, 256], [256]]
    assert all(ids.dtype == np.int32 for ids in documents)
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (258, 256, 257)


def word_tokenizer(path, template=None, special=("</s>",)):
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "<pad>": 9}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens([AddedToken(name, special=True) for name in special])
    if template:
        words.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 3), ("</s>", 4)])
    words.enable_truncation(2)
    words.enable_padding(length=7, pad_id=9, pad_token="<pad>")
    words.save(str(path))
    return str(path)


def test_a_tokenizer_json_neither_cuts_nor_pads(tmp_path):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (10, 4, 4)
    assert tokenizer.encode("a b a").tolist() == [1, 2, 1]
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a b a", "b", ""])] == [[1, 2, 1, 4], [2, 4], [4]]


def test_end_of_text_inside_and_at_the_end_of_a_text_is_real(tmp_path):  # K08, K09
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json"))
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a</s> b", "a</s> b</s>"])] == [
        [1, 4, 2, 4],
        [1, 4, 2, 4, 4],
    ]


@pytest.mark.parametrize(
    ("template", "expected"), [("<s> $A", [3, 1, 4]), ("<s> $A </s>", [3, 1, 4]), ("$A </s>", [1, 4])]
)
def test_the_template_is_kept_and_end_of_text_comes_once(tmp_path, template, expected):
    tokenizer = open_tokenizer(word_tokenizer(tmp_path / "tokenizer.json", template))
    assert tokenizer.encode_documents(["a"])[0].tolist() == expected
    assert tokenizer.encode("a").tolist() == [1]


def test_tokenizer_config_decides_the_special_ids(tmp_path):
    path = word_tokenizer(tmp_path / "tokenizer.json")
    guessed = open_tokenizer(path).fingerprint
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": {"content": "b"}, "pad_token": "<pad>"}))
    tokenizer = open_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 9)
    assert tokenizer.fingerprint != guessed
    settings.write_text(json.dumps({"eos_token": "<none>"}))
    with pytest.raises(
        DataError, match=r"eos_token must be in the vocabulary, got '<none>', in .*tokenizer_config.json"
    ):
        open_tokenizer(path)
    for content, found in (("{", "must be JSON"), ("[]", "must be a JSON object, got list")):
        settings.write_text(content)
        with pytest.raises(DataError, match=found):
            open_tokenizer(path)


def test_without_end_of_text_nothing_is_appended(tmp_path):
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.eos_id, tokenizer.pad_id) == (None, 0)
    assert tokenizer.encode_documents(["a"])[0].tolist() == [0]


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    write(tmp_path / "tokenizer.json", b"{}")
    with pytest.raises(DataError, match=r"data.tokenizer must be a tokenizer.json, got .*, in .*tokenizer.json"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))
    Tokenizer(WordLevel({}, unk_token="a")).save(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match=r"data.tokenizer must have a vocabulary"):
        open_tokenizer(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match=r"data.tokenizer must be an existing file, got .*none.json"):
        open_tokenizer(str(tmp_path / "none.json"))


def test_missing_files_are_listed_by_field(tmp_path):
    assert missing_files(DataConfig(source="pydoc", tokenizer="bytes")) == []
    faults = missing_files(DataConfig(source="none.jsonl", tokenizer=str(tmp_path / "none.json")))
    assert [field for field, _ in faults] == ["source", "tokenizer"]
    assert faults[0][1] == (
        "must be an existing file, got none.jsonl; correct the path or use 'pydoc', which needs no file"
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("source", "corpus.txt", "must be 'pydoc' or the path of a .jsonl file, got 'corpus.txt'"),
        ("tokenizer", "gpt2", "must be 'bytes' or the path of a tokenizer.json, got 'gpt2'"),
        ("min_tokens", 1, "greater than or equal to 2"),
        ("overlong", "cut", "'truncate', 'split', 'drop' or 'error'"),
        ("eval_fraction", 1.0, "less than 1"),
        ("sources", "pydoc", "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_data_section_is_refused(field, value, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**{"source": "pydoc", "tokenizer": "bytes", field: value})


def test_stores_lie_in_the_cache_unless_told_otherwise(monkeypatch, tmp_path):
    config = DataConfig(source="pydoc", tokenizer="bytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_root(config) == tmp_path / "ms_varlen" / "token_stores"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_root(config) == tmp_path / ".cache" / "ms_varlen" / "token_stores"
    assert store_root(config.model_copy(update={"store_dir": "~/stores"})) == tmp_path / "stores"


def test_nothing_here_imports_mindspore():
    code = "import sys, ms_varlen.data.store; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_byte_ids_fit_the_vocabulary():
    assert ByteTokenizer.vocab_size == 1 + max(ByteTokenizer.eos_id, ByteTokenizer.pad_id)


def test_lognormal_lengths_have_the_median_and_p99_asked_for():
    source = open_source("lognormal(median=180, p99=2048, samples=4000, seed=0)")
    documents = list(source)
    tokens = np.array([ids.size for ids in ByteTokenizer().encode_documents([d.text for d in documents])])
    median, p99 = np.percentile(tokens, [50, 99])
    assert len(documents) == 4000
    assert abs(median / 180 - 1) < 0.05
    assert abs(p99 / 2048 - 1) < 0.2
    assert tokens.min() >= 2
    assert documents[-1].done == 1.0
    assert all(set(d.text) <= set(" abcdefghijklmnopqrstuvwxyz") and d.text.strip() == d.text for d in documents)
    assert max(len(word) for d in documents for word in d.text.split()) <= 10


def test_lognormal_is_a_function_of_its_settings():
    def found(source):
        return texts(open_source(source)), open_source(source).fingerprint()

    first = found("lognormal(median=20, p99=90, samples=30, seed=3)")
    assert first == found("lognormal( seed=3,samples = 30, p99=90, median=20 )")
    others = [found(f"lognormal(median=20, p99=90, samples=30, seed={seed})") for seed in (4, 5)]
    assert len({tuple(t) for t, _ in (first, *others)}) == len({f for _, f in (first, *others)}) == 3
    assert LognormalSource(LognormalLengths.parse("lognormal()")).lengths == LognormalLengths(180, 2048, 20000, 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("lognormal(mean=3)", r"lognormal\(...\) with each of median, p99, samples, seed at most once, got"),
        ("lognormal(median=3, median=4)", "at most once"),
        ("lognormal(median=3 p99=9)", "at most once"),
        ("lognormal(median=1.5)", "at most once"),
        ("lognormal(median=300, p99=200)", "must have 2 <= median < p99 and samples >= 1"),
        ("lognormal(median=1)", "must have 2 <= median"),
        ("lognormal(samples=0)", "samples >= 1"),
    ],
)
def test_wrong_lognormal_is_refused(source, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(source=source, tokenizer="bytes")


def test_lognormal_needs_no_file():
    assert missing_files(DataConfig(source="lognormal()", tokenizer="bytes")) == []
