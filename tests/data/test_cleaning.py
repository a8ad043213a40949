import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ms_varlen.data.config import DataConfig
from ms_varlen.data.sources.record import Record
from ms_varlen.data.tokens.cleaning import REMOVED, Cleaner, Ledger, Rules, SeenKeys, held_out, pieces, shown_text
from ms_varlen.data.tokens.records import Encoded, RecordEncoder
from ms_varlen.data.tokens.tokenizers import open_tokenizer
from ms_varlen.errors import DataError

POLICIES = ["truncate", "split", "drop"]


def document(tokens, supervised=None, **changes):
    """A document of ids 0, 1, 2, ...; `supervised` is written "..x": x for a target."""
    mask = None if supervised is None else np.array([mark == "x" for mark in supervised], bool)
    assert mask is None or mask.size == tokens
    fields = {"key": bytes(8), "where": "c.jsonl line 3", "excerpt": "text", "empty": False, "control": 0} | changes
    return Encoded(np.arange(tokens, dtype=np.int32), mask, **fields)


def clean(documents, rules, split="train"):
    cleaner = Cleaner(rules)
    return cleaner, cleaner.clean(documents, [split] * len(documents))


def lengths(cleaned):
    return [[ids.size for ids, _ in entry.pieces] for entry in cleaned]


def run(sizes, limit, overlong, min_tokens=2):
    """The lengths of the samples of documents of the given sizes, and the ledger."""
    cleaner, cleaned = clean([document(size) for size in sizes], Rules(min_tokens, overlong, limit))
    return lengths(cleaned), cleaner.ledgers["train"]


def shown(found):
    """Pieces as id lists with a bracket around targets."""
    return [
        [f"[{token}]" if supervised is None or supervised[place] else f"{token}" for place, token in enumerate(ids)]
        for ids, supervised in found
    ]


def test_truncate_reports_one_token_lost_and_split_none():
    samples, ledger = run([4, 2, 3, 1], 3, "truncate", min_tokens=1)
    assert samples == [[3], [2], [3], [1]]
    assert (ledger.tokens_cut, ledger.documents_cut, ledger.tokens_kept) == (1, 1, 9)
    samples, ledger = run([4, 2, 3, 1], 3, "split", min_tokens=1)
    assert samples == [[3, 1], [2], [3], [1]]
    assert (ledger.tokens_cut, ledger.tokens_kept, ledger.samples_kept) == (0, 10, 5)


def test_with_a_minimum_of_two_a_piece_without_a_target_is_cut():
    samples, ledger = run([4, 2, 3, 1], 3, "split")
    assert samples == [[3], [2], [3], []]
    assert ledger == Ledger(
        documents_in=4,
        tokens_in=10,
        documents_short=1,
        tokens_short=1,
        documents_cut=1,
        tokens_cut=1,
        documents_kept=3,
        samples_kept=3,
        tokens_kept=8,
        targets_kept=5,
    )
    assert ledger.balanced


def test_truncated_tails_make_no_samples():
    samples, ledger = run([13, 11], 10, "truncate")
    assert samples == [[10], [10]]
    assert (ledger.tokens_cut, ledger.documents_cut) == (4, 2)


def test_truncated_tails_of_fine_tuning_samples_make_no_samples():
    sizes, marks = [13, 11], ["." * 9 + "x" * 4, "." * 8 + "x" * 3]
    cleaner, cleaned = clean(
        [document(size, mark) for size, mark in zip(sizes, marks, strict=True)], Rules(2, "truncate", 10)
    )
    assert [shown(entry.pieces) for entry in cleaned] == [
        [["0", "1", "2", "3", "4", "5", "6", "7", "8", "[9]"]],
        [["0", "1", "2", "3", "4", "5", "6", "7", "[8]", "[9]"]],
    ]
    assert [entry.reason for entry in cleaned] == ["cut", "cut"]
    ledger = cleaner.ledgers["train"]
    assert (ledger.tokens_cut, ledger.targets_kept, ledger.samples_kept, ledger.balanced) == (4, 3, 2, True)


def test_truncate_keeps_the_number_of_samples():
    assert run([6], 4, "truncate")[0] == [[4]]


def test_masks_stay_with_their_samples():
    _, cleaned = clean([document(3, "..x"), document(2, ".x")], Rules(2, "split", 8))
    assert [shown(entry.pieces) for entry in cleaned] == [[["0", "1", "[2]"]], [["0", "[1]"]]]


def test_drop_is_reported_by_count_and_tokens():
    samples, ledger = run([9, 5, 5], 8, "drop")
    assert samples == [[], [5], [5]]
    assert (ledger.documents_overlong, ledger.tokens_overlong, ledger.tokens_kept) == (1, 9, 10)
    assert (ledger.documents_dropped, ledger.tokens_dropped) == (1, 9)


def test_split_keeps_every_piece():
    assert run([20], 8, "split")[0] == [[8, 8, 4]]


def test_what_is_removed_is_replaced_by_nothing():
    cleaner, cleaned = clean(
        [document(5), document(0, empty=True), document(5), document(1), document(9)], Rules(2, "drop", 8)
    )
    assert lengths(cleaned) == [[5], [], [5], [], []]
    assert [entry.reason for entry in cleaned] == [None, "empty", None, "short", "overlong"]
    assert cleaner.ledgers["train"].samples_kept == 2


@pytest.mark.parametrize(
    ("tokens", "expected"), [(7, [7]), (8, [8]), (9, [8]), (10, [8, 2]), (16, [8, 8]), (17, [8, 8])]
)
def test_split_at_the_limit(tokens, expected):
    assert [ids.size for ids, _ in pieces(document(tokens), Rules(2, "split", 8))] == expected


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("head", ["[0]", "[1]", "[2]", "[3]", "[4]"]),
        ("tail", ["[4]", "[5]", "[6]", "[7]", "[8]"]),
        ("both", ["[0]", "[1]", "[2]", "7", "[8]"]),  # nothing says what follows 2
    ],
)
def test_truncate_keeps_what_is_asked_for(keep, expected):
    found = pieces(document(9), Rules(2, "truncate", 5, keep))
    assert shown(found) == [expected]
    assert found[0][0].dtype == np.int32
    assert shown(pieces(document(5), Rules(2, "truncate", 5, keep))) == [[f"[{n}]" for n in range(5)]]


@pytest.mark.parametrize(
    ("overlong", "keep", "marks", "expected", "reason"),
    [
        ("truncate", "head", "......xx", [], "unsupervised"),
        ("truncate", "tail", "......xx", [["4", "5", "[6]", "[7]"]], "cut"),
        ("truncate", "both", "......xx", [["0", "1", "6", "[7]"]], "cut"),
        ("truncate", "both", "......x.", [], "unsupervised"),  # its only target would follow the gap
        ("truncate", "head", "xx......", [["[0]", "[1]", "2", "3"]], "cut"),
        ("truncate", "tail", "xx......", [], "unsupervised"),
        ("truncate", "head", "x.....xx", [], "unsupervised"),  # the first token is never a target
        ("split", "head", "......xx", [["4", "5", "[6]", "[7]"]], "cut"),
        ("split", "head", ".x..x...", [["0", "[1]", "2", "3"]], "cut"),
        ("split", "head", ".x....x.", [["0", "[1]", "2", "3"], ["4", "5", "[6]", "7"]], None),
        ("split", "head", "........", [], "unsupervised"),
        ("drop", "head", ".......x", [], "overlong"),
    ],
)
def test_no_sample_is_without_a_target(overlong, keep, marks, expected, reason):
    cleaner, cleaned = clean([document(8, marks)], Rules(2, overlong, 4, keep))
    assert (shown(cleaned[0].pieces), cleaned[0].reason) == (expected, reason)
    assert cleaner.ledgers["train"].balanced


def test_a_short_document_without_a_target_is_removed():
    cleaner, cleaned = clean([document(4, "x..."), document(4, "....")], Rules(2, "split", 8))
    assert [entry.reason for entry in cleaned] == ["unsupervised", "unsupervised"]
    assert cleaner.ledgers["train"].tokens_unsupervised == 8


def test_error_names_the_document_and_the_settings():
    message = (
        r"a document must be <= 8 tokens \(model.seq_length\) under data.overlong=error, got 20, in c.jsonl line 3; "
        "raise model.seq_length or set data.overlong to split, truncate or drop"
    )
    with pytest.raises(DataError, match=message):
        clean([document(20)], Rules(2, "error", 8))
    assert lengths(clean([document(8)], Rules(2, "error", 8))[1]) == [[8]]


@pytest.mark.parametrize("overlong", [*POLICIES, "error"])
def test_white_space_is_empty_however_long(overlong):
    encoder = RecordEncoder(open_tokenizer("bytes"), "text")
    documents = encoder.encode([Record({"text": text}, "", 1.0) for text in ("", " \n" * 5)])
    cleaner, cleaned = clean(documents, Rules(2, overlong, 4))
    assert lengths(cleaned) == [[], []]
    assert cleaner.ledgers["train"] == Ledger(documents_in=2, tokens_in=12, documents_empty=2, tokens_empty=12)


def test_control_characters_are_counted_and_dropped_when_asked():
    documents = [document(3, control=2, excerpt="a\x00b\x1b[31m"), document(3)]
    cleaner, cleaned = clean(documents, Rules(2, "split", 8))
    assert (lengths(cleaned), cleaner.ledgers["train"].documents_with_control) == ([[3], [3]], 1)
    example = {"where": "c.jsonl line 3", "text": r"a\x00b\x1b[31m", "tokens": 3}
    assert cleaner.examples == {"with_control": [example]}
    cleaner, cleaned = clean(documents, Rules(2, "split", 8, control_characters="drop"))
    assert (lengths(cleaned), cleaner.ledgers["train"].documents_control) == ([[], [3]], 1)
    assert cleaner.examples == {"control": [example]}


def test_removed_control_characters_make_neither_a_text_nor_another_one():
    encoder = RecordEncoder(open_tokenizer("bytes"), "text", "remove")
    documents = encoder.encode([Record({"text": text}, "", 1.0) for text in ("\0\x7f", "abc", "a\0bc")])
    _, cleaned = clean(documents, Rules(2, "split", 8, deduplicate=True, control_characters="remove"))
    assert [entry.reason for entry in cleaned] == ["empty", None, "duplicate"]


def numbered(numbers, **changes):
    return [document(3, key=int(number).to_bytes(8, "little"), **changes) for number in numbers]


def test_duplicates_go_in_and_across_batches_and_splits():
    cleaner = Cleaner(Rules(2, "split", 8, deduplicate=True))
    first = cleaner.clean(numbered([1, 2, 1]), ["eval", "train", "train"])
    assert [entry.reason for entry in first] == [None, None, "duplicate"]
    assert [entry.reason for entry in cleaner.clean(numbered([3, 2, 3]), ["train"] * 3)] == [
        None,
        "duplicate",
        "duplicate",
    ]
    assert [entry.reason for entry in cleaner.clean(numbered([0, 0], empty=True), ["train"] * 2)] == ["empty"] * 2
    assert cleaner.clean([], []) == []
    assert cleaner.ledgers["train"].documents_duplicate == 3
    assert [entry.reason for entry in Cleaner(Rules(2, "split", 8)).clean(numbered([1, 1]), ["train"] * 2)] == [
        None
    ] * 2


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=12))
def test_seen_keys_are_a_set(batches):
    seen, expected = SeenKeys(), set()
    for batch in batches:
        fresh = []
        for key in batch:
            fresh.append(key not in expected)
            expected.add(key)
        assert seen.add(np.array(batch, np.uint64)).tolist() == fresh


def test_examples_are_few_and_on_one_line():
    documents = [document(1, excerpt=f"{number}\n\tü") for number in range(9)]
    cleaner, _ = clean(documents, Rules(2, "split", 8))
    assert cleaner.examples == {
        "short": [{"where": "c.jsonl line 3", "text": rf"{number}\n\tü", "tokens": 1} for number in range(5)]
    }
    assert shown_text("a\x1b[0m\u2028\ue000'\"\\") == "a\\x1b[0m\\u2028\\ue000'\"\\"


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_min_tokens_beyond_the_limit_is_refused(min_tokens):
    message = rf"data.min_tokens must be from 1 to model.seq_length \(8\), got {min_tokens}"
    with pytest.raises(DataError, match=message):
        Rules(min_tokens, "split", 8)


@st.composite
def some_documents(draw):
    marks = draw(st.one_of(st.integers(0, 50), st.text("..x", max_size=50)))
    tokens, supervised = (marks, None) if isinstance(marks, int) else (len(marks), marks)
    changes = {"empty": draw(st.booleans()) and draw(st.booleans()), "control": draw(st.integers(0, 1))}
    return document(tokens, supervised, key=draw(st.binary(min_size=8, max_size=8)), **changes)


@given(
    st.lists(some_documents(), max_size=20),
    st.integers(1, 6),
    st.integers(6, 12),
    st.sampled_from([*((policy, "head") for policy in POLICIES), ("truncate", "tail"), ("truncate", "both")]),
    st.booleans(),
    st.sampled_from(["keep", "drop"]),
)
def test_the_ledger_balances_and_samples_keep_to_the_rules(documents, least, limit, policy, deduplicate, control):
    rules = Rules(least, policy[0], limit, policy[1], deduplicate, control)
    cleaner, cleaned = clean(documents, rules, "eval")
    ledger, found = cleaner.ledgers["eval"], [piece for entry in cleaned for piece in entry.pieces]
    assert cleaner.ledgers["train"] == Ledger()
    assert ledger.balanced
    assert (ledger.documents_in, ledger.tokens_in) == (len(documents), sum(entry.ids.size for entry in documents))
    assert (ledger.samples_kept, ledger.tokens_kept) == (len(found), sum(ids.size for ids, _ in found))
    assert ledger.documents_kept == sum(bool(entry.pieces) for entry in cleaned)
    assert ledger.documents_cut == sum(entry.reason == "cut" for entry in cleaned)
    for reason in REMOVED:
        assert getattr(ledger, f"documents_{reason}") == sum(entry.reason == reason for entry in cleaned)
    targets = [ids.size - 1 if mask is None else int(mask[1:].sum()) for ids, mask in found]
    assert ledger.targets_kept == sum(targets)
    for (ids, mask), count in zip(found, targets, strict=True):
        assert least <= ids.size <= limit
        assert mask is None or (mask.size == ids.size and count >= 1)


@given(st.integers(2, 500), st.integers(2, 40))
def test_split_loses_less_than_min_tokens(tokens, limit):
    found = [ids.size for ids, _ in pieces(document(tokens), Rules(2, "split", limit))]
    assert tokens - sum(found) in (0, 1)
    assert found[:-1] == [limit] * (len(found) - 1)


def test_ledgers_add_up():
    both = run([4, 9], 8, "split")[1] + run([1, 9], 8, "drop")[1]
    assert both == Ledger(
        documents_in=4,
        tokens_in=23,
        documents_short=1,
        tokens_short=1,
        documents_overlong=1,
        tokens_overlong=9,
        documents_cut=1,
        tokens_cut=1,
        documents_kept=2,
        samples_kept=2,
        tokens_kept=12,
        targets_kept=10,
    )
    assert both.balanced


def test_an_unbalanced_ledger_is_seen():
    assert not Ledger(documents_in=1, tokens_in=3, documents_kept=1, tokens_kept=2).balanced
    assert not Ledger(documents_in=1, tokens_in=3, tokens_kept=3).balanced


def test_held_out_is_a_stable_share_of_the_documents():
    encoder = RecordEncoder(open_tokenizer("bytes"), "text")
    keys = [entry.key for entry in encoder.encode([Record({"text": f"text {i}"}, "", 1.0) for i in range(10_000)])]
    assert keys[0] == hashlib.blake2b(b"text 0", digest_size=8, person=b"ms_varlen.eval").digest()
    assert [i for i in range(100) if held_out(keys[i], 0.02)] == [22, 48, 62, 67, 85, 91]
    assert not any(held_out(key, 0.0) for key in keys)
    assert {key for key in keys if held_out(key, 0.02)} <= {key for key in keys if held_out(key, 0.1)}
    assert sum(held_out(key, 0.1) for key in keys) == pytest.approx(1000, abs=100)


def test_keep_is_of_truncate_alone():
    message = r"keep must be left out with overlong=split, got tail; set overlong=truncate"
    with pytest.raises(ValidationError, match=message):
        DataConfig(source="pydoc", tokenizer="bytes", keep="tail")
    assert DataConfig(source="pydoc", tokenizer="bytes", keep="tail", overlong="truncate").keep == "tail"
