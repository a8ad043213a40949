import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.data.cleaning import Ledger, Rules, clean, held_out, pieces
from ms_varlen.errors import DataError

POLICIES = ["truncate", "split", "drop"]


def run(lengths, limit, overlong, min_tokens=2):
    """The samples of documents of the given lengths, and the ledger."""
    ledger = Ledger()
    rules = Rules(min_tokens, overlong, limit)
    return [clean("text", tokens, rules, ledger, "here") for tokens in lengths], ledger


def test_k02_truncate_reports_one_token_lost_and_split_none():
    samples, ledger = run([4, 2, 3, 1], 3, "truncate", min_tokens=1)
    assert samples == [[3], [2], [3], [1]]
    assert (ledger.tokens_cut, ledger.documents_cut, ledger.tokens_kept) == (1, 1, 9)
    samples, ledger = run([4, 2, 3, 1], 3, "split", min_tokens=1)
    assert samples == [[3, 1], [2], [3], [1]]
    assert (ledger.tokens_cut, ledger.tokens_kept, ledger.samples_kept) == (0, 10, 5)


def test_k02_with_a_minimum_of_two_a_piece_without_a_target_is_cut():
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
    )
    assert ledger.balanced


def test_k03_truncated_tails_make_no_samples():
    samples, ledger = run([13, 11], 10, "truncate")
    assert samples == [[10], [10]]
    assert (ledger.tokens_cut, ledger.documents_cut) == (4, 2)


def test_k04_truncate_keeps_the_number_of_samples():
    assert run([6], 4, "truncate")[0] == [[4]]


def test_k14_drop_is_reported_by_count_and_tokens():
    samples, ledger = run([9, 5, 5], 8, "drop")
    assert samples == [[], [5], [5]]
    assert (ledger.documents_overlong, ledger.tokens_overlong, ledger.tokens_kept) == (1, 9, 10)
    assert (ledger.documents_dropped, ledger.tokens_dropped) == (1, 9)


def test_k16_split_keeps_every_piece():
    assert run([20], 8, "split")[0] == [[8, 8, 4]]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(7, [7]), (8, [8]), (9, [8]), (10, [8, 2]), (16, [8, 8]), (17, [8, 8])]
)
def test_split_at_the_limit(tokens, expected):
    assert pieces(tokens, Rules(2, "split", 8)) == expected


def test_error_names_the_document_and_the_settings():
    message = (
        r"a document must be <= 8 tokens \(model.seq_length\) under data.overlong=error, got 20, in c.jsonl line 3; "
        "raise model.seq_length or set data.overlong to split, truncate or drop"
    )
    with pytest.raises(DataError, match=message):
        clean("text", 20, Rules(2, "error", 8), Ledger(), "c.jsonl line 3")
    assert clean("text", 8, Rules(2, "error", 8), Ledger(), "") == [8]


@pytest.mark.parametrize("overlong", [*POLICIES, "error"])
def test_white_space_is_empty_however_long(overlong):
    ledger = Ledger()
    assert [clean(text, n, Rules(2, overlong, 4), ledger, "") for text, n in (("", 1), (" \n" * 5, 11))] == [[], []]
    assert ledger == Ledger(documents_in=2, tokens_in=12, documents_empty=2, tokens_empty=12)


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_min_tokens_beyond_the_limit_is_refused(min_tokens):
    message = rf"data.min_tokens must be from 1 to model.seq_length \(8\), got {min_tokens}"
    with pytest.raises(DataError, match=message):
        Rules(min_tokens, "split", 8)


@given(
    st.lists(st.tuples(st.sampled_from(["", " ", "text"]), st.integers(0, 50)), max_size=20),
    st.integers(1, 6),
    st.integers(6, 12),
    st.sampled_from(POLICIES),
)
def test_the_ledger_balances_and_samples_keep_to_the_rules(documents, min_tokens, limit, overlong):
    ledger, rules = Ledger(), Rules(min_tokens, overlong, limit)
    samples = [clean(text, tokens, rules, ledger, "") for text, tokens in documents]
    lengths = [length for sample in samples for length in sample]
    assert ledger.balanced
    assert (ledger.documents_in, ledger.tokens_in) == (len(documents), sum(tokens for _, tokens in documents))
    assert (ledger.samples_kept, ledger.tokens_kept) == (len(lengths), sum(lengths))
    assert ledger.documents_kept == sum(bool(sample) for sample in samples)
    assert all(min_tokens <= length <= limit for length in lengths)


@given(st.integers(2, 500), st.integers(2, 40))
def test_split_loses_less_than_min_tokens(tokens, limit):
    lengths = pieces(tokens, Rules(2, "split", limit))
    assert tokens - sum(lengths) in (0, 1)
    assert lengths[:-1] == [limit] * (len(lengths) - 1)


def test_ledgers_add_up():
    both = run([4, 9], 8, "split")[1] + run([1, 9], 8, "drop")[1]
    assert both == Ledger(4, 23, 0, 0, 1, 1, 1, 9, 1, 1, 2, 2, 12)
    assert both.balanced


def test_an_unbalanced_ledger_is_seen():
    assert not Ledger(documents_in=1, tokens_in=3, documents_kept=1, tokens_kept=2).balanced
    assert not Ledger(documents_in=1, tokens_in=3, tokens_kept=3).balanced


def test_held_out_is_a_stable_share_of_the_texts():
    chosen = [i for i in range(100) if held_out(f"text {i}", 0.02)]
    assert chosen == [22, 48, 62, 67, 85, 91]
    assert not any(held_out(f"text {i}", 0.0) for i in range(100))
    assert set(chosen) <= {i for i in range(100) if held_out(f"text {i}", 0.1)}
    assert sum(held_out(f"text {i}", 0.1) for i in range(10_000)) == pytest.approx(1000, abs=100)
