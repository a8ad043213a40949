import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ms_varlen.data import store as store_module
from ms_varlen.data.cleaning import Ledger, held_out
from ms_varlen.data.config import DataConfig
from ms_varlen.data.store import TokenStore, prepare_store
from ms_varlen.data.store_files import canonical_hash, token_dtype
from ms_varlen.errors import DataError

HELD_OUT = "text 22"  # its hash lies in the lowest 2 %
TEXTS = ["abcdefghijk", "", "xyz", HELD_OUT, "q", "abcdefgh"]


def corpus(folder, texts=TEXTS) -> DataConfig:
    path = Path(folder, "corpus.jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataConfig(source=str(path), tokenizer="bytes", store_dir=str(Path(folder, "stores")))


def rows(table):
    return [table.tokens(i).tolist() for i in range(len(table))]


def ids(text):
    return list(text.encode())


def stored(config):
    """The names in the folder of the stores, locks apart."""
    return sorted(path.name for path in Path(config.store_dir).iterdir() if path.suffix != ".lock")


def test_a_small_corpus_becomes_two_tables(tmp_path):
    store = prepare_store(corpus(tmp_path), 5)
    assert rows(store.train) == [
        ids("abcde"),
        ids("fghij"),
        [*ids("k"), 256],
        [*ids("xyz"), 256],
        [*ids("q"), 256],
        ids("abcde"),
        [*ids("fgh"), 256],
    ]
    assert rows(store.eval) == [ids("text "), [*ids("22"), 256]]
    assert store.train.lengths.tolist() == [5, 5, 2, 4, 2, 5, 4]
    assert store.train.offsets.tolist() == [0, 5, 10, 12, 16, 18, 23]
    assert store.train.document_ids.tolist() == [0, 0, 0, 2, 4, 5, 5]
    assert store.eval.document_ids.tolist() == [3, 3]
    assert (store.train.total_tokens, store.train.longest, len(store.train)) == (27, 5, 7)
    assert (store.vocab_size, store.eos_id, store.pad_id, store.seq_length) == (258, 256, 257, 5)
    assert store.ledgers == {
        "train": Ledger(
            documents_in=5,
            tokens_in=28,
            documents_empty=1,
            tokens_empty=1,
            documents_kept=4,
            samples_kept=7,
            tokens_kept=27,
        ),
        "eval": Ledger(documents_in=1, tokens_in=8, documents_kept=1, samples_kept=2, tokens_kept=8),
    }
    assert store.train.lengths.dtype == store.train.tokens(0).dtype == np.int32
    assert store.train.offsets.dtype == store.train.document_ids.dtype == np.int64
    store.verify()


def test_gather_puts_samples_one_after_another(tmp_path):
    train = prepare_store(corpus(tmp_path), 5).train
    assert train.gather(np.array([3, 0, 3])).tolist() == [*ids("xyz"), 256, *ids("abcde"), *ids("xyz"), 256]
    assert train.gather([3]).dtype == np.int32
    assert train.gather([]).tolist() == []


@pytest.mark.parametrize("wrong", [-1, 7])
def test_a_sample_that_is_not_there_is_named(tmp_path, wrong):
    with pytest.raises(DataError, match=rf"ids\[1\] must be a sample from 0 to 6, got {wrong}; use a plan"):
        prepare_store(corpus(tmp_path), 5).train.gather([0, wrong])


def test_tables_are_read_only_and_mapped(tmp_path):
    train = prepare_store(corpus(tmp_path), 5).train
    with pytest.raises(ValueError, match="read-only"):
        train.lengths[0] = 1
    assert isinstance(train.lengths.base, np.memmap)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text(max_size=30), min_size=1, max_size=12), st.integers(2, 9), st.sampled_from(["split", "truncate"])
)
def test_samples_are_the_documents_in_order(tmp_path_factory, texts, seq_length, overlong):
    texts = ["always there", *texts]
    config = corpus(tmp_path_factory.mktemp("store"), texts).model_copy(update={"overlong": overlong})
    store = prepare_store(config, seq_length)
    total = store.ledgers["train"] + store.ledgers["eval"]
    assert total.balanced
    assert (total.documents_in, total.tokens_in) == (len(texts), sum(len(text.encode()) + 1 for text in texts))
    assert total.tokens_kept == store.train.total_tokens + store.eval.total_tokens
    assert total.samples_kept == len(store.train) + len(store.eval)
    for number, text in enumerate(texts):
        table, other = (store.eval, store.train) if held_out(text, 0.02) else (store.train, store.eval)
        kept = table.gather(np.flatnonzero(table.document_ids == number)).tolist()
        assert kept == [*ids(text), 256][: len(kept)]
        assert number not in other.document_ids


def test_batches_do_not_show_in_the_result(tmp_path, monkeypatch):
    whole = prepare_store(corpus(tmp_path), 5)
    monkeypatch.setattr(store_module, "BATCH_DOCUMENTS", 2)
    calls = []
    config = corpus(tmp_path).model_copy(update={"store_dir": str(tmp_path / "other")})
    parts = prepare_store(config, 5, lambda done, documents: calls.append((done, documents)))
    assert parts.manifest == whole.manifest
    assert [documents for _, documents in calls] == [2, 4, 6]
    assert calls[-1][0] == 1.0


def test_a_store_is_reused_and_not_written_again(tmp_path):
    config = corpus(tmp_path)
    first = prepare_store(config, 5)
    times = {path: path.stat().st_mtime_ns for path in Path(config.store_dir).rglob("*")}
    assert prepare_store(config, 5, pytest.fail).folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in Path(config.store_dir).rglob("*")} == times
    os.utime(config.source, (0, 0))
    moved = Path(config.source).rename(tmp_path / "moved.jsonl")
    assert prepare_store(config.model_copy(update={"source": str(moved)}), 5).folder == first.folder


def test_every_setting_is_part_of_the_fingerprint(tmp_path):
    config = corpus(tmp_path)
    changes = [{}, {"min_tokens": 3}, {"overlong": "truncate"}, {"eval_fraction": 0.03}]
    found = [prepare_store(config.model_copy(update=change), 5).fingerprint for change in changes]
    found.append(prepare_store(config, 6).fingerprint)
    found.append(prepare_store(corpus(tmp_path, [*TEXTS, "new"]), 5).fingerprint)
    assert len(set(found)) == len(found) == 6
    assert sorted(found) == stored(config)


def test_lengths_fingerprint_is_of_the_lengths_alone(tmp_path):
    config = corpus(tmp_path, ["abc", "defg"])
    other = corpus(tmp_path, ["xyz", "uvwx"]).model_copy(update={"min_tokens": 3})
    first = prepare_store(corpus(tmp_path, ["abc", "defg"]), 5).train.lengths_fingerprint
    assert prepare_store(corpus(tmp_path, ["xyz", "uvwx"]), 5).train.lengths_fingerprint == first
    assert prepare_store(other, 5).train.lengths_fingerprint == first
    assert prepare_store(config, 4).train.lengths_fingerprint != first


KILLED_BUILD = """
import os, signal, sys
from ms_varlen.data import store
from ms_varlen.data.config import DataConfig

point, source, folder = sys.argv[1:]
kill = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
store.BATCH_DOCUMENTS = 2
if point == "before the manifest":
    store.write_manifest = kill
if point == "before the rename":
    os.rename = kill
if point == "after the rename":
    store.sync_folder = kill
config = DataConfig(source=source, tokenizer="bytes", store_dir=folder)
store.prepare_store(config, 5, kill if point == "in a batch" else None)
"""


@pytest.mark.parametrize("point", ["in a batch", "before the manifest", "before the rename", "after the rename"])
def test_a_killed_build_leaves_a_whole_store_or_none(tmp_path, point):
    config = corpus(tmp_path)
    command = [sys.executable, "-c", KILLED_BUILD, point, config.source, config.store_dir]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    left = stored(config)
    assert len(left) == 1
    assert left[0].endswith(".building") == (point != "after the rename")
    store = prepare_store(config, 5)
    store.verify()
    assert rows(store.eval) == [ids("text "), [*ids("22"), 256]]
    assert stored(config) == [store.fingerprint]


def test_leftovers_of_other_stores_go_unless_someone_is_at_work(tmp_path):
    config = corpus(tmp_path)
    for name in ("dead.building/train", "busy.building/train"):
        Path(config.store_dir, name).mkdir(parents=True)
    with Path(config.store_dir, "busy.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = prepare_store(config, 5)
    assert stored(config) == [store.fingerprint, "busy.building"]


def test_two_builders_at_once_build_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "ms_varlen")
    config = corpus(tmp_path)
    building, both_started = threading.Event(), threading.Event()
    builds, stores = [], []

    def progress(done, documents):
        builds.append(documents)
        building.set()
        assert both_started.wait(10)

    threads = [threading.Thread(target=lambda: stores.append(prepare_store(config, 5, progress))) for _ in range(2)]
    threads[0].start()
    assert building.wait(10)
    threads[1].start()
    while not any("waiting for it" in message for message in caplog.messages):
        assert threads[1].is_alive()
    both_started.set()
    for thread in threads:
        thread.join(10)
    assert builds == [len(TEXTS)]
    assert [store.fingerprint for store in stores] == stored(config) * 2


def test_a_failed_build_cleans_up(tmp_path):
    config = corpus(tmp_path)
    with pytest.raises(DataError, match=r"must be <= 5 tokens .* got 12, in .*corpus.jsonl line 1"):
        prepare_store(config.model_copy(update={"overlong": "error"}), 5)
    assert stored(config) == []


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path):
    config = corpus(tmp_path)
    with pytest.raises(DataError, match=r"data.source must not change while it is read, .*corpus.jsonl; run again"):
        prepare_store(config, 5, lambda done, documents: corpus(tmp_path, ["other"]))
    assert stored(config) == []


@pytest.mark.parametrize("texts", [[], ["", " "], [HELD_OUT]])
def test_a_corpus_without_a_training_sample_is_refused(tmp_path, texts):
    message = rf"data.source must leave a sample to train on, got none of {len(texts)} documents .* in corpus.jsonl"
    with pytest.raises(DataError, match=message):
        prepare_store(corpus(tmp_path, texts), 5)


def test_no_held_out_documents_make_an_empty_table(tmp_path):
    store = prepare_store(corpus(tmp_path).model_copy(update={"eval_fraction": 0.0}), 5)
    assert (len(store.eval), store.eval.longest, store.eval.gather([]).tolist()) == (0, 0, [])
    assert 3 in store.train.document_ids
    store.verify()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    config = corpus(tmp_path).model_copy(update={"store_dir": str(tmp_path / "file")})
    with pytest.raises(
        DataError, match=r"data.store_dir must be writable .* in .*file; free space or set data.store_dir"
    ):
        prepare_store(config, 5)


@pytest.mark.parametrize("name", ["train/tokens.bin", "train/lengths.bin", "eval/offsets.bin", "train/documents.bin"])
def test_a_damaged_file_is_named(tmp_path, name):
    config = corpus(tmp_path)
    store = prepare_store(config, 5)
    path = store.folder / name
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    TokenStore.open(store.folder)  # of the right size: opening alone does not read it
    with pytest.raises(DataError, match=rf"{name} must have checksum \w+, got \w+; delete the folder"):
        prepare_store(config, 5)  # a run does, for a changed token would train unnoticed
    path.write_bytes(content[:-1])
    with pytest.raises(
        DataError, match=rf"{name} must have {len(content)} bytes, got {len(content) - 1} bytes; delete"
    ):
        prepare_store(config, 5)
    path.unlink()
    with pytest.raises(DataError, match=rf"{name} must have {len(content)} bytes, got no file; delete the folder"):
        TokenStore.open(store.folder)


def resealed(content: bytes, **changes) -> bytes:
    entries = {**json.loads(content), **changes}
    del entries["checksum"]
    return json.dumps({**entries, "checksum": canonical_hash(entries)}).encode()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.replace(b'"samples": 7', b'"samples": 6'), "must have the checksum that it states"),
        (lambda content: content[: len(content) // 2], "must be JSON, got"),
        (lambda content: b"[]", "must have the checksum that it states"),
        (lambda content: resealed(content, format_version=0), "must have format_version 1, got 0"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, damage, message):
    store = prepare_store(corpus(tmp_path), 5)
    path = store.folder / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    with pytest.raises(DataError, match=f"manifest.json {message}.*; delete the folder of the store and run again"):
        TokenStore.open(store.folder)
    path.unlink()
    with pytest.raises(DataError, match=r"manifest.json must be there, got no file; delete the folder"):
        TokenStore.open(store.folder)


def test_large_ids_and_end_of_text_inside_a_sample_survive(tmp_path):  # K08, K09
    words = Tokenizer(WordLevel({"a": 70_000, "</s>": 4}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    config = corpus(tmp_path, ["a </s> a"]).model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    store = prepare_store(config, 8)
    assert rows(store.train) == [[70_000, 4, 70_000, 4]]
    assert store.train.lengths.tolist() == [4]
    assert store.pad_id == store.eos_id == 4
    store.verify()


def test_ids_take_two_bytes_where_they_fit():
    assert [token_dtype(size) for size in (258, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]
