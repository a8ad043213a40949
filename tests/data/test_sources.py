import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ms_varlen.data.config import DataConfig, LognormalLengths, missing_files, store_root
from ms_varlen.data.sources import record_batches as batches
from ms_varlen.data.sources import text_files
from ms_varlen.data.sources.builtin import Lognormal, Pydoc
from ms_varlen.data.sources.source import Source, open_source
from ms_varlen.data.tokens.tokenizers import ByteTokenizer
from ms_varlen.errors import DataError


def texts(source):
    return [record.fields["text"] for record in source]


def rows(source):
    return [(record.fields, record.where) for record in source]


def write(path, content: bytes | str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*documents):
    return "".join(json.dumps({"text": text}) + "\n" for text in documents)


def pydoc(folder):
    return Source("pydoc", [Pydoc(folder)])


@pytest.fixture
def library(tmp_path):
    """A small standard library with everything that has to be left out or counted."""
    root = tmp_path / "lib"
    write(
        root / "b.py",
        '"""Module b."""\ndef f():\n    """Said twice."""\nclass C:\n    """Class."""\n    def g(self): pass\n',
    )
    write(root / "a.py", 'async def h():\n    """Said twice."""\nif True:\n    def k():\n        """Nested."""\n')
    write(root / "pkg" / "c.py", '"""Grüße."""\nx = "\\d"\n')
    write(root / "pkg" / "broken.py", "def (:\n")
    write(root / "pkg" / "latin.py", b'"""\xe9"""\n')
    write(root / "pkg" / "half.py", '"""\\ud800"""\n')
    write(root / "notes.txt", "not Python")
    for left_out in ("site-packages", "test", "pkg/tests", "idlelib"):
        write(root / left_out / "d.py", '"""Left out."""\n')
    return root


def test_pydoc_gives_distinct_docstrings_in_a_fixed_order(library):
    source = pydoc(library)
    expected = ["Said twice.", "Nested.", "Module b.", "Class.", "Grüße."]
    places = ["a.py", "a.py", "b.py", "b.py", "pkg/c.py"]
    assert rows(source) == [({"text": text}, place) for text, place in zip(expected, places, strict=True)]
    assert source.skipped == {"unparsed_files": 2, "unencodable_docstrings": 1}
    assert texts(source) == expected, "a second iteration starts from the beginning"
    assert source.skipped == {"unparsed_files": 2, "unencodable_docstrings": 1}


def test_pydoc_fingerprint_follows_content_and_not_place(library, tmp_path):
    before = pydoc(library).fingerprint()
    moved = library.rename(tmp_path / "elsewhere")
    assert pydoc(moved).fingerprint() == before
    write(moved / "test" / "d.py", '"""Still left out."""\n')
    assert pydoc(moved).fingerprint() == before
    write(moved / "a.py", '"""Other."""\n')
    assert pydoc(moved).fingerprint() != before


def test_pydoc_reads_the_running_library(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_RECORDS", 1)  # stop after the first file
    assert next(iter(open_source("pydoc"))).done > 0


def test_json_lines_give_objects_places_and_shares(tmp_path):
    content = b'\xef\xbb\xbf{"text": "a"}\n\n{"id": 1, "text": "\\u00fc\\u2028"}\r\n{"text": ""}'
    path = write(tmp_path / "c.jsonl", content)
    source = open_source(str(path))
    found = list(source)
    assert [record.fields for record in found] == [{"text": "a"}, {"id": 1, "text": "ü\u2028"}, {"text": ""}]
    assert [record.where for record in found] == [f"{path} line 1", f"{path} line 3", f"{path} line 4"]
    assert found[-1].done == 1.0
    assert source.skipped == {"blank_lines": 1}
    assert source.name == "c.jsonl"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=12), st.integers(1, 60), st.booleans())
def test_batches_do_not_show_in_json_lines(tmp_path_factory, documents, batch_bytes, compressed):
    path = tmp_path_factory.mktemp("lines") / ("c.jsonl.gz" if compressed else "c.jsonl")
    content = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in documents).encode("utf-8", "ignore")
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "BATCH_BYTES", batch_bytes)
        found = list(open_source(str(path)))
    assert [record.fields["text"] for record in found] == documents
    assert [record.where for record in found] == [f"{path} line {i + 1}" for i in range(len(documents))]
    shares = [record.done for record in found]
    assert shares == sorted(shares)


def test_a_text_file_is_a_document(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffOne.\n\nStill one, ü.\n")
    assert rows(open_source(str(path))) == [({"text": "One.\n\nStill one, ü.\n"}, str(path))]


def test_a_folder_stands_for_its_files_in_order(tmp_path):
    for name, text in (("b.txt", "2"), ("a/z.txt", "1"), ("c/a.txt", "3"), (".git/a.txt", "no"), ("_logs/a.txt", "no")):
        write(tmp_path / name, text)
    write(tmp_path / "README.md", "no")
    (tmp_path / "c" / "again").symlink_to(tmp_path)
    write(tmp_path / "_SUCCESS", "")
    source = open_source(str(tmp_path))
    assert rows(source) == [
        ({"text": str(i)}, str(tmp_path / name))
        for i, name in zip((1, 2, 3), ("a/z.txt", "b.txt", "c/a.txt"), strict=True)
    ]
    assert source.skipped == {"other_files": 1}


def test_several_sources_are_read_one_after_another(tmp_path):
    first = write(tmp_path / "one.jsonl", lines("a", "b"))
    second = write(tmp_path / "two.txt", "c")
    third = write(tmp_path / "three.json.gz", gzip.compress(lines("d").encode()))
    source = open_source([str(second), str(first), str(third)])
    assert rows(source) == [
        ({"text": "c"}, str(second)),
        ({"text": "a"}, f"{first} line 1"),
        ({"text": "b"}, f"{first} line 2"),
        ({"text": "d"}, f"{third} line 1"),
    ]
    shares = [record.done for record in source]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert source.name == "two.txt, one.jsonl, three.json.gz"
    assert source.fingerprint() != open_source([str(first), str(second), str(third)]).fingerprint()


def test_fingerprints_are_of_the_content(tmp_path):
    one = open_source(str(write(tmp_path / "one.jsonl", lines("a"))))
    two = open_source(str(write(tmp_path / "two.jsonl", lines("a"))))
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint() != open_source(str(write(tmp_path / "one.txt", lines("a")))).fingerprint()
    write(tmp_path / "two.jsonl", lines("b"))
    assert one.fingerprint() != two.fingerprint()
    # Where one file ends and the next begins counts, for a text file is a document.
    for folder, parts in (("x", ("ab", "c")), ("y", ("a", "bc"))):
        for name, text in zip("12", parts, strict=True):
            write(tmp_path / folder / f"{name}.txt", text)
    assert open_source(str(tmp_path / "x")).fingerprint() != open_source(str(tmp_path / "y")).fingerprint()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a line must be a JSON object, got Expecting .*, in .*c.jsonl line 2; fix"),
        (b'["a"]', r"a line must be a JSON object, got an array, in .*c.jsonl line 2; fix or remove the line"),
        (b"[", r"a line must be a JSON object, got Expecting .*, in .*c.jsonl line 2; write one object a line"),
        (b"3", r"a line must be a JSON object, got int, in .*c.jsonl line 2; fix"),
        (b"[" * 100_000, r"a line must be a JSON object, got .*, in .*c.jsonl line 2"),
        (b'{"text": "\xff"}', r"a line must be UTF-8, got byte 0xff at byte 10, in .*c.jsonl line 2; save"),
        (b'{"text": "a\x00"}', r"a line must be a JSON object, got Invalid control character .*, in .*c.jsonl line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "c.jsonl", b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(open_source(str(path)))


def test_a_text_of_another_encoding_is_named(tmp_path):
    path = write(tmp_path / "a.txt", "Grüße".encode("latin-1"))
    with pytest.raises(DataError, match=r"a text file must be UTF-8, got byte 0xfc at byte 2, in .*a.txt; save"):
        list(open_source(str(path)))


def test_a_giant_record_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(text_files, "BATCH_BYTES", 30)
    path = write(tmp_path / "c.jsonl", lines("a", "b" * 90, "c" * 200, "d"))
    with pytest.raises(DataError, match=r"a record must be <= 100 bytes, got \d+ or more, in .*c.jsonl line 3; write"):
        list(open_source(str(path)))
    path = write(tmp_path / "a.txt", "a" * 101)
    with pytest.raises(
        DataError, match=r"a record must be <= 100 bytes, got 101 or more, in .*a.txt; write one document"
    ):
        list(open_source(str(path)))


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: data[:-9], "Compressed file ended"),
        (lambda data: b"{}" + data, "Not a gzipped file"),
        (lambda data: data[:12] + bytes(8) + data[20:], ""),
    ],
)
def test_a_damaged_gzip_file_is_named(tmp_path, damage, found):
    path = write(tmp_path / "c.jsonl.gz", damage(gzip.compress(lines(*map(str, range(50))).encode())))
    with pytest.raises(DataError, match=rf"a source must be a whole gzip file, got .*{found}.*c.jsonl.gz; copy"):
        list(open_source(str(path)))


def test_a_path_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data.source must be an existing file or folder, got .*none.jsonl; correct"):
        open_source(str(tmp_path / "none.jsonl"))
    path = write(tmp_path / "corpus.csv", "a,b")
    with pytest.raises(DataError, match=r"data.source must be a file that ends in .jsonl.* got .*corpus.csv; convert"):
        open_source(str(path))
    with pytest.raises(DataError, match=r"data.source must hold a file that ends in .* got .*corpus.csv, in .*; conv"):
        open_source(str(tmp_path))
    (tmp_path / "all" / "saved").mkdir(parents=True)
    write(tmp_path / "all" / "saved" / "dataset_info.json", "{}")
    with pytest.raises(DataError, match=r"must be a folder of files, got a saved data set, in .*all/saved; name that"):
        open_source(str(tmp_path / "all"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data.source must hold a file .* got an empty folder, in .*empty"):
        open_source(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"data.validation_source must be an existing file or folder"):
        open_source(["pydoc", "none.txt"], "data.validation_source")


def test_a_folder_of_two_kinds_is_told_by_the_field_that_names_it(tmp_path):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.jsonl", lines("b"))
    for field in ("data.source", "data.validation_source"):
        with pytest.raises(
            DataError, match=rf"^{field} must be a folder of one kind of files, got .*b.jsonl and .*a.txt"
        ):
            open_source(str(tmp_path), field)


def test_a_folder_of_several_kinds_is_refused_by_name(tmp_path):
    write(tmp_path / "b.txt", "a")
    write(tmp_path / "sub" / "a.jsonl", "")
    with pytest.raises(DataError, match=r"a folder of one kind of files, got .*a.jsonl and .*b.txt, in .*; move one"):
        open_source(str(tmp_path))


def test_missing_files_are_listed_by_field(tmp_path):
    assert missing_files(DataConfig(source="pydoc", tokenizer="bytes")) == []
    config = DataConfig(
        source=["pydoc", "none.jsonl"], validation_source=__file__, tokenizer=str(tmp_path / "none.json")
    )
    faults = missing_files(config)
    assert [field for field, _ in faults] == ["source", "validation_source", "tokenizer"]
    assert faults[0][1] == (
        "must be an existing file or folder, got none.jsonl; correct the path or use 'pydoc', which needs none"
    )
    assert "must be a file that ends in .jsonl" in faults[1][1]
    assert missing_files(DataConfig(source="lognormal()", tokenizer="bytes")) == []
    assert "File name too long" in missing_files(DataConfig(source="a" * 300 + ".jsonl", tokenizer="bytes"))[0][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, "must be a path, 'pydoc' or 'lognormal"),
        ({"source": []}, "must name a source, got an empty list"),
        ({"source": ["pydoc", "lognormal(mean=1)"]}, "at most once"),
        ({"validation_source": "a\0"}, "must be a path"),
        ({"validation_source": "pydoc", "eval_fraction": 0.1}, "eval_fraction must be left out with validation_source"),
        ({"min_tokens": 1}, "greater than or equal to 2"),
        ({"overlong": "cut"}, "'truncate', 'split', 'drop' or 'error'"),
        ({"eval_fraction": 1.0}, "less than 1"),
        ({"workers": 0}, "greater than or equal to 1"),
        ({"sources": "pydoc"}, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_data_section_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**{"source": "pydoc", "tokenizer": "bytes", **changes})


def test_stores_lie_in_the_cache_unless_told_otherwise(monkeypatch, tmp_path):
    config = DataConfig(source="pydoc", tokenizer="bytes")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_root(config) == tmp_path / "ms_varlen" / "token_stores"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_root(config) == tmp_path / ".cache" / "ms_varlen" / "token_stores"
    assert store_root(config.model_copy(update={"store_dir": "~/stores"})) == tmp_path / "stores"


def test_nothing_here_imports_what_is_not_needed():
    code = (
        "import sys, ms_varlen.data.store.store; "
        "sys.exit(any(name in sys.modules for name in ('mindspore', 'pyarrow', 'datasets', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, ms_varlen.data.config; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lognormal_lengths_have_the_median_and_p99_asked_for():
    documents = list(open_source("lognormal(median=180, p99=2048, samples=4000, seed=0)"))
    found = [record.fields["text"] for record in documents]
    tokens = np.array([ids.size for ids in ByteTokenizer().encode_documents(found)])
    median, p99 = np.percentile(tokens, [50, 99])
    assert len(documents) == 4000
    assert abs(median / 180 - 1) < 0.05
    assert abs(p99 / 2048 - 1) < 0.2
    assert tokens.min() >= 2
    assert (documents[-1].where, documents[-1].done) == ("document 4000", 1.0)
    assert all(set(text) <= set(" abcdefghijklmnopqrstuvwxyz") and text.strip() == text for text in found)
    assert max(len(word) for text in found for word in text.split()) <= 10


def test_lognormal_is_a_function_of_its_settings():
    def found(source):
        return texts(open_source(source)), open_source(source).fingerprint()

    first = found("lognormal(median=20, p99=90, samples=30, seed=3)")
    assert first == found("lognormal( seed=3,samples = 30, p99=90, median=20 )")
    others = [found(f"lognormal(median=20, p99=90, samples=30, seed={seed})") for seed in (4, 5)]
    assert len({tuple(t) for t, _ in (first, *others)}) == len({f for _, f in (first, *others)}) == 3
    assert Lognormal(LognormalLengths.parse("lognormal()")).lengths == LognormalLengths(180, 2048, 20000, 0)


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
