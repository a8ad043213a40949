import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from ms_varlen.data.config import DataConfig
from ms_varlen.data.sources import record_batches as batches
from ms_varlen.data.sources import source as sources
from ms_varlen.data.sources import text_files
from ms_varlen.data.sources.record import Record
from ms_varlen.data.store import store as store_module
from ms_varlen.data.store.files import MaskWriter, canonical_hash, token_dtype
from ms_varlen.data.store.store import TokenStore, prepare_store
from ms_varlen.data.tokens import encoding
from ms_varlen.data.tokens.cleaning import Ledger, held_out
from ms_varlen.data.tokens.records import RecordEncoder
from ms_varlen.data.tokens.tokenizers import ByteTokenizer
from ms_varlen.errors import DataError
from ms_varlen.planning.plan import EpochPlan, PlanSettings

HELD_OUT = "text 22"  # its hash lies in the lowest 2 %
TEXTS = ["abcdefghijk", "", "xyz", HELD_OUT, "q", "abcdefgh"]


def lines(path, records) -> str:
    """A JSON lines file of objects, or of texts."""
    found = [record if isinstance(record, dict) else {"text": record} for record in records]
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return str(path)


def corpus(folder, records=TEXTS, **settings) -> DataConfig:
    source = lines(Path(folder, "corpus.jsonl"), records)
    return DataConfig(**{"source": source, "tokenizer": "bytes", "store_dir": str(Path(folder, "stores")), **settings})


def rows(table):
    return [table.tokens(i).tolist() for i in range(len(table))]


def ids(text):
    return list(text.encode())


def stored(config):
    """The names in the folder of the stores, locks and the memory of files apart."""
    return sorted(path.name for path in Path(config.store_dir).iterdir() if path.suffix not in (".lock", ".json"))


def is_held_out(text, fraction=0.02):
    (encoded,) = RecordEncoder(ByteTokenizer(), "text").encode([Record({"text": text}, "", 0.0)])
    return held_out(encoded.key, fraction)


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
            targets_kept=20,
        ),
        "eval": Ledger(documents_in=1, tokens_in=8, documents_kept=1, samples_kept=2, tokens_kept=8, targets_kept=6),
    }
    assert (store.train.total_targets, store.eval.total_targets) == (20, 6)
    assert store.train.document_lengths.tolist() == [12, 4, 2, 9]
    assert store.train.gather_supervised([0, 1]) is None
    assert not list(store.folder.glob("*/supervised.bin"))
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
        table, other = (store.eval, store.train) if is_held_out(text) else (store.train, store.eval)
        kept = table.gather(np.flatnonzero(table.document_ids == number)).tolist()
        assert kept == [*ids(text), 256][: len(kept)]
        assert number not in other.document_ids


def test_batches_do_not_show_in_the_result(tmp_path, monkeypatch):
    whole = prepare_store(corpus(tmp_path), 5)
    monkeypatch.setattr(text_files, "BATCH_BYTES", 50)
    calls = []
    config = corpus(tmp_path, store_dir=str(tmp_path / "other"))
    parts = prepare_store(config, 5, lambda done, documents: calls.append((done, documents)))
    assert parts.manifest == whole.manifest
    assert [documents for _, documents in calls] == [2, 5, 6]
    assert calls[-1][0] == 1.0


CHATTY = [{"prompt": "ab", "completion": "cdefgh"[:n]} for n in range(1, 7)] * 20


@pytest.mark.parametrize("records", [[f"{n} {text}" for n in range(40) for text in TEXTS], CHATTY])
def test_the_number_of_processes_does_not_show_in_the_result(tmp_path, monkeypatch, records):
    monkeypatch.setattr(text_files, "BATCH_BYTES", 200)
    config = corpus(tmp_path, records)
    alone = prepare_store(config.model_copy(update={"workers": 1}), 5)
    calls = []
    several = config.model_copy(update={"workers": 3, "store_dir": str(tmp_path / "other")})
    store = prepare_store(several, 5, lambda done, documents: calls.append((done, documents)))
    assert len(calls) > encoding.PARALLEL_FROM + 2, "there were batches for the other processes"
    assert calls == sorted(calls)
    assert store.manifest == alone.manifest
    store.verify()
    assert rows(store.train) == rows(alone.train)


def test_the_first_bad_record_is_named_by_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BATCH_BYTES", 20)
    records = [*(f"text {n}" for n in range(40)), {"text": 1}, *(f"text {n}" for n in range(9)), {"text": None}]
    config = corpus(tmp_path, records, workers=2)
    with pytest.raises(DataError, match=r"field 'text' must be a string, got int, in .*corpus.jsonl line 41; fix"):
        prepare_store(config, 5)
    # Two batches on, reading itself fails: a line without an end.
    Path(config.source).write_text(Path(config.source).read_text()[:-1] + "x" * 99)
    monkeypatch.setattr(batches, "MAX_RECORD_BYTES", 40)
    with pytest.raises(DataError, match=r"must be a string, got int, in .*corpus.jsonl line 41; fix"):
        prepare_store(config, 5)
    lines(Path(config.source), [f"text {n}" for n in range(40)] + ["x" * 99])
    with pytest.raises(DataError, match=r"a record must be <= 40 bytes, got \d+ or more, in .*corpus.jsonl line 41"):
        prepare_store(config, 5)
    assert stored(config) == []


def test_a_process_that_dies_ends_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "BATCH_BYTES", 20)
    monkeypatch.setattr(encoding, "SERVE", "import sys; sys.exit(3)")
    config = corpus(tmp_path, [f"text {n}" for n in range(40)], workers=2)
    with pytest.raises(DataError, match=r"a process that makes tokens must go on to the end, got exit status 3; what"):
        prepare_store(config, 5)
    assert stored(config) == []


def test_a_store_is_reused_and_not_written_again(tmp_path):
    config = corpus(tmp_path)
    first = prepare_store(config, 5)
    times = {path: path.stat().st_mtime_ns for path in Path(config.store_dir).rglob("*")}
    assert prepare_store(config, 5, pytest.fail).folder == first.folder
    assert {path: path.stat().st_mtime_ns for path in Path(config.store_dir).rglob("*")} == times
    os.utime(config.source, (0, 0))
    moved = Path(config.source).rename(tmp_path / "moved.jsonl")
    assert prepare_store(config.model_copy(update={"source": str(moved)}), 5).folder == first.folder


def test_a_reused_store_is_not_read_again_until_a_file_changes(tmp_path, monkeypatch):
    config = corpus(tmp_path)
    os.utime(config.source, (1e9, 1e9))  # long ago: a change would show
    folder = prepare_store(config, 5).folder
    read = []
    for module in (store_module, sources):
        original = module.file_hash
        monkeypatch.setattr(module, "file_hash", lambda path, original=original: read.append(path) or original(path))
    assert prepare_store(config, 5).folder == folder
    assert read == []
    os.utime(config.source, (2e9, 2e9))  # in the future: another change may come without a new time
    for _ in range(2):
        assert prepare_store(config, 5).folder == folder
        assert read == [Path(config.source)]
        read.clear()
    tokens = folder / "train" / "tokens.bin"
    os.utime(tokens)
    assert prepare_store(config, 5).folder == folder
    assert tokens in read
    read.clear()
    assert prepare_store(config, 5).folder == folder
    assert read == [Path(config.source)]
    (folder.parent / "file_memory.json").write_text("{damaged")
    assert prepare_store(config, 5).folder == folder


def test_every_setting_is_part_of_the_fingerprint(tmp_path):
    config = corpus(tmp_path)
    changes = [
        {},
        {"min_tokens": 3},
        {"overlong": "truncate"},
        {"eval_fraction": 0.03},
        {"deduplicate": True},
        {"validation_source": config.source},
    ]
    found = [prepare_store(config.model_copy(update=change), 5).fingerprint for change in changes]
    found.append(prepare_store(config, 6).fingerprint)
    found.append(prepare_store(corpus(tmp_path, [*TEXTS, "new"]), 5).fingerprint)
    assert len(set(found)) == len(found) == 8
    assert sorted(found) == stored(config)
    same = config.model_copy(update={"workers": 2, "source": [config.source]})
    assert prepare_store(corpus(tmp_path), 5).fingerprint == prepare_store(same, 5).fingerprint == found[0]


def test_lengths_fingerprint_is_of_the_lengths_alone(tmp_path):
    config = corpus(tmp_path, ["abc", "defg"])
    other = corpus(tmp_path, ["xyz", "uvwx"]).model_copy(update={"min_tokens": 3})
    first = prepare_store(corpus(tmp_path, ["abc", "defg"]), 5).train.lengths_fingerprint
    assert prepare_store(corpus(tmp_path, ["xyz", "uvwx"]), 5).train.lengths_fingerprint == first
    assert prepare_store(other, 5).train.lengths_fingerprint == first
    assert prepare_store(config, 4).train.lengths_fingerprint != first


KILLED_BUILD = """
import os, signal, sys
from ms_varlen.data.store import store
from ms_varlen.data.store import build as store_build
from ms_varlen.data.sources import text_files
from ms_varlen.data.config import DataConfig

point, source, folder = sys.argv[1:]
kill = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
text_files.BATCH_BYTES = 50
if point == "before the manifest":
    store_build.write_manifest = kill
if point == "before the rename":
    os.rename = kill
if point == "after the rename":
    rename = os.rename
    store_build.publish = lambda *places: (rename(*places), kill())
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


KILLED_WITH_WORKERS = """
import os, signal, sys
from ms_varlen.data.store import store
from ms_varlen.data.sources import text_files
from ms_varlen.data.config import DataConfig

text_files.BATCH_BYTES = 20
def kill(done, documents):
    if documents > 20:
        children = [open(f"/proc/self/task/{thread}/children").read() for thread in os.listdir("/proc/self/task")]
        print(*children, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
store.prepare_store(DataConfig(source=sys.argv[1], tokenizer="bytes", store_dir=sys.argv[2], workers=2), 5, kill)
"""


def test_a_killed_build_leaves_no_processes(tmp_path):
    config = corpus(tmp_path, [f"text {n}" for n in range(60)])
    command = [sys.executable, "-c", KILLED_WITH_WORKERS, config.source, config.store_dir]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    workers = done.stdout.split()
    assert len(workers) == 2
    until = time.monotonic() + 20
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.05)
    prepare_store(config, 5).verify()


def is_running(pid: str) -> bool:
    try:
        return b"ms_varlen.data.tokens.encoding" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


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


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["", " "], r"2 documents: 2 empty \(no text .*\); in corpus.jsonl; add records"),
        ([HELD_OUT], r"1 documents: 1 held out \(data.eval_fraction\); in corpus"),
        (["", "x", HELD_OUT], r"3 documents: 1 empty \(.*\), 1 short \(fewer than .*\), 1 held out \("),
    ],
)
def test_a_corpus_without_a_training_sample_is_refused(tmp_path, texts, found):
    with pytest.raises(DataError, match=f"data.source must leave a sample to train on, got none of {found}"):
        prepare_store(corpus(tmp_path, texts, min_tokens=3), 5)


def test_a_validation_source_is_all_of_evaluation(tmp_path):
    held = lines(tmp_path / "held.jsonl", ["uvw", "", HELD_OUT, "abc"])
    config = corpus(tmp_path, ["abc", HELD_OUT, "defgh"], validation_source=held)
    calls = []
    store = prepare_store(config, 5, lambda done, documents: calls.append((done, documents)))
    assert rows(store.eval) == [[*ids("uvw"), 256], ids("text "), [*ids("22"), 256], [*ids("abc"), 256]]
    assert store.eval.document_ids.tolist() == [0, 2, 2, 3]
    assert rows(store.train) == [[*ids("abc"), 256], ids("text "), [*ids("22"), 256], ids("defgh")]
    assert store.train.document_ids.tolist() == [0, 1, 1, 2]
    assert store.manifest["kind"] == {"train": "text", "eval": "text"}
    assert [documents for _, documents in calls] == [4, 7]
    assert 0 < calls[0][0] < calls[1][0] == 1.0


def test_training_documents_that_are_validated_are_duplicates(tmp_path):
    held = lines(tmp_path / "held.jsonl", ["abc", "abc", "uvw"])
    store = prepare_store(corpus(tmp_path, ["abc", "defg"], validation_source=held, deduplicate=True), 5)
    assert rows(store.eval) == [[*ids("abc"), 256], [*ids("uvw"), 256]]
    assert rows(store.train) == [[*ids("defg"), 256]]
    assert store.ledgers["train"].documents_duplicate == store.ledgers["eval"].documents_duplicate == 1
    assert [example["where"] for example in store.manifest["examples"]["duplicate"]] == [
        f"{held} line 2",
        f"{tmp_path}/corpus.jsonl line 1",
    ]


def test_a_validation_source_without_a_sample_is_refused(tmp_path):
    held = lines(tmp_path / "held.jsonl", ["", " "])
    message = r"data.validation_source must leave a sample to evaluate on, got none of 2 documents: .* in held.jsonl"
    with pytest.raises(DataError, match=message):
        prepare_store(corpus(tmp_path, validation_source=held), 5)


def test_training_documents_that_are_all_validated_are_told_apart_from_those_of_the_validation(tmp_path):
    held = lines(tmp_path / "held.jsonl", ["abc", "uvw"])
    message = (
        r"data.source must leave a sample to train on, got none of 1 documents: 1 duplicate \(.*\); in corpus.jsonl"
    )
    with pytest.raises(DataError, match=message):
        prepare_store(corpus(tmp_path, ["abc"], validation_source=held, deduplicate=True), 5)


def test_evaluation_sees_every_sample_once(tmp_path):
    held = lines(tmp_path / "held.jsonl", ["abcdefghijklmnop"[: n % 5 + 2] for n in range(13)])
    store = prepare_store(corpus(tmp_path, validation_source=held), 8)
    for policy, row_lengths in (("rows", ()), ("bucketed", (4, 8)), ("token_budget", ())):
        settings = PlanSettings(
            policy=policy,
            size=8 if policy == "rows" else 64,
            max_segments=8,
            micro_batches=1,
            seed=0,
            row_lengths=row_lengths,
        )
        plan = EpochPlan(store.eval.lengths, settings, None)
        seen = np.concatenate([plan.micro_batch(step, 0) for step in range(plan.num_steps)])
        assert sorted(seen.tolist()) == list(range(13))


def test_nothing_takes_the_place_of_what_cleaning_removed(tmp_path):
    texts = ["abc", "", "abc", "q", "abcdefghijk", "xyz"]
    store = prepare_store(corpus(tmp_path, texts, min_tokens=3, deduplicate=True, overlong="drop"), 8)
    assert store.train.document_ids.tolist() == [0, 5]
    ledger = store.ledgers["train"]
    assert (ledger.documents_empty, ledger.documents_duplicate, ledger.documents_short, ledger.documents_overlong) == (
        1,
        1,
        1,
        1,
    )
    for epoch in (0, 1):
        plan = EpochPlan(store.train.lengths, PlanSettings("token_budget", 8, 4, micro_batches=1, seed=0), epoch)
        assert sorted(plan.batches.order.tolist()) == [0, 1]


def test_padding_is_in_no_sample(tmp_path):
    records = [
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 7, 8, 9], "attention_mask": [0, 1, 1, 1]},
        {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]},
    ]
    store = prepare_store(corpus(tmp_path, records, eval_fraction=0.0, deduplicate=True), 8)
    assert rows(store.train) == [[5, 6], [7, 8, 9]]
    assert store.ledgers["train"].documents_duplicate == 1


def test_truncated_tails_make_no_samples(tmp_path):
    config = corpus(tmp_path, ["a" * 12, "b" * 10], overlong="truncate")
    store = prepare_store(config, 10)
    assert rows(store.train) == [ids("a" * 10), ids("b" * 10)]
    assert store.train.document_lengths.tolist() == [13, 11]
    assert (store.ledgers["train"].tokens_cut, store.ledgers["train"].documents_cut) == (4, 2)


def test_lengths_before_cutting_are_those_of_kept_and_overlong_documents(tmp_path):
    texts = ["", "q", "abcdefghijk", "abc", "abc", "defg"]
    kept = {}
    for overlong in ("split", "truncate", "drop"):
        config = corpus(tmp_path, texts, overlong=overlong, deduplicate=True, min_tokens=3, eval_fraction=0.0)
        kept[overlong] = prepare_store(config, 5).train.document_lengths.tolist()
    assert kept == {overlong: [12, 4, 5] for overlong in ("split", "truncate", "drop")}


def test_what_is_not_to_be_learnt_is_kept_a_bit_a_token(tmp_path):
    records = [
        {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]},
        {"input_ids": [8, 9], "labels": [-100, 9]},
        {"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]},
        {"input_ids": [10, 11, 12, 13, 14, 15, 16], "labels": [-100, 11, -100, 13, -100, -100, 16]},
    ]
    store = prepare_store(corpus(tmp_path, records, eval_fraction=0.0), 5)
    assert rows(store.train) == [[5, 6, 7], [8, 9], [1, 2, 3, 4], [10, 11, 12, 13, 14], [15, 16]]
    expected = [[0, 0, 1], [0, 1], [1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 1]]
    assert [store.train.gather_supervised([i]).tolist() for i in range(5)] == [list(map(bool, m)) for m in expected]
    assert store.train.gather_supervised([3, 0]).astype(int).tolist() == [*expected[3], *expected[0]]
    assert store.train.gather_supervised([]).tolist() == []
    assert store.train.total_targets == 1 + 1 + 3 + 2 + 1
    assert (store.folder / "train" / "supervised.bin").stat().st_size == 2
    assert store.manifest["kind"] == {"train": "tokens"}
    store.verify()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.lists(st.booleans(), max_size=20)), max_size=12))
def test_masks_come_back_as_written(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("mask") / "supervised.bin"
    writer = MaskWriter(path)
    expected = []
    for part in parts:
        mask = np.array(part, bool) if isinstance(part, list) else None
        writer.write(len(part) if isinstance(part, list) else part, mask)
        expected += part if isinstance(part, list) else [True] * part
    entry = writer.close()
    if all(expected):
        assert entry is None
        assert not path.exists()
    else:
        content = np.frombuffer(path.read_bytes(), np.uint8)
        assert entry["bytes"] == content.size == -(-len(expected) // 8)
        assert np.unpackbits(content, bitorder="little")[: len(expected)].tolist() == expected


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


@pytest.mark.parametrize(
    "name", ["train/tokens.bin", "train/lengths.bin", "eval/offsets.bin", "train/document_lengths.bin"]
)
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
        (lambda content: resealed(content, format_version=0), "must have format_version 3, got 0"),
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


def test_large_ids_and_end_of_text_inside_a_sample_survive(tmp_path):
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
