import contextlib
import threading

import numpy as np
import pytest

from ms_varlen.batches.layout import lay_out
from ms_varlen.bridge.config import PACKED_COLUMNS
from ms_varlen.bridge.feed import open_feed, packed_row, padded_row, remembered_feed
from ms_varlen.bridge.loader import VarlenDataLoader
from ms_varlen.errors import DataError, LengthsError
from ms_varlen.lengths import SeqLens
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.workload import prepare
from tests.support.bridge_cases import ROOT, packed_keys, padded_keys, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def columns_of(lens: SeqLens, tokens: list[int]) -> dict:
    return lay_out(lens, np.array(tokens), 0)


def assert_columns(row: dict, expected: dict) -> None:
    assert {name: values.tolist() for name, values in row.items()} == expected
    assert {values.dtype for values in row.values()} == {np.dtype(np.int32)}


def test_a_packed_row_has_running_ends_filled_with_its_length():
    row = packed_row(columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9]), 4)
    assert_columns(
        row,
        {
            "input_ids": [5, 6, 7, 8, 9, 0, 0, 0],
            "labels": [6, 7, -100, 9, -100, -100, -100, -100],
            "loss_mask": [1, 1, 0, 1, 0, 0, 0, 0],
            "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
            "actual_seq_len": [3, 5, 8, 8],
        },
    )


def test_a_row_with_as_many_segments_as_entries_ends_at_its_length():
    row = packed_row(columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9]), 3)
    assert row["actual_seq_len"].tolist() == [3, 5, 8]


def test_more_segments_than_entries_are_refused_with_the_key_to_set():
    columns = columns_of(SeqLens.packed([3, 2], 8, 8), [5, 6, 7, 8, 9])
    with pytest.raises(
        LengthsError, match=r"at most 2 entries .* got 3 segments; set .*compressed_eod_mask_length to 3"
    ):
        packed_row(columns, 2)


def test_padded_rows_are_whole_or_cut_to_their_samples():
    columns = columns_of(SeqLens.in_rows([3, 2], 8, 4, 3, split_tails=False), [5, 6, 7, 8, 9])
    assert_columns(
        padded_row(columns, 0, 3, cut=False),
        {
            "input_ids": [5, 6, 7, 0],
            "labels": [6, 7, -100, -100],
            "loss_mask": [1, 1, 0, 0],
            "position_ids": [0, 1, 2, 3],
        },
    )
    assert padded_row(columns, 1, 3, cut=True)["input_ids"].tolist() == [8, 9]
    assert padded_row(columns, 2, 3, cut=True)["loss_mask"].tolist() == [0]
    assert padded_row(columns, 2, 3, cut=False)["loss_mask"].tolist() == [0, 0, 0, 0]


def test_each_sample_is_fed_once_over_the_ranks_in_equal_steps(corpus):
    feeds = [open_feed(packed_keys(corpus), PACKED_COLUMNS, 2, rank, 2) for rank in range(2)]
    steps = feeds[0].steps
    assert [len(feed) for feed in feeds] == [2 * steps, 2 * steps]
    planned = np.concatenate([feeds[0].sample_ids(step) for step in range(steps)])
    assert np.unique(planned).size == planned.size
    table, fed = feeds[0].workload.store.train, []
    for feed in feeds:
        for index in range(len(feed)):
            row = feed.row(index)
            starts = np.flatnonzero(row["position_ids"] == 0)
            real = row["input_ids"][starts] != feed.workload.store.pad_id
            fed += [
                tuple(row["input_ids"][start:end])
                for start, end in zip(starts[real], row["actual_seq_len"][: real.sum()], strict=True)
            ]
    assert sorted(fed) == sorted(tuple(table.tokens(int(sample))) for sample in planned)


def test_the_feed_trains_what_our_own_recipe_would(corpus, tmp_path):
    overrides = [
        *(f"data.{key}={value}" for key, value in corpus.items()),
        "data.eval_fraction=0",
        "train.eval_every=null",
        "batch.token_budget=2048",
        "batch.max_segments=128",
        "train.seed=5",
        "model.seq_length=512",
        "model.max_position_embeddings=512",
    ]
    ours = prepare(load_recipe(ROOT / "recipes" / "packed.yaml", overrides))
    feed = open_feed(packed_keys(corpus, seed=5, longest_sample=512), PACKED_COLUMNS)
    plan = ours.plans.epoch(0)
    assert feed.steps == plan.num_steps
    for step in range(feed.steps):
        np.testing.assert_array_equal(feed.sample_ids(step), plan.step_ids(step))


def test_steps_continue_over_epochs_with_other_orders(corpus):
    per_epoch = open_feed(packed_keys(corpus), PACKED_COLUMNS).steps
    feed = open_feed(packed_keys(corpus, steps=3 * per_epoch), PACKED_COLUMNS)
    places = [feed.place(step) for step in range(feed.steps)]
    assert places[0].epoch == 0
    assert {place.epoch for place in places} >= {0, 1, 2}
    first = [feed.sample_ids(step) for step, place in enumerate(places) if place.epoch == 0]
    second = [feed.sample_ids(step) for step, place in enumerate(places) if place.epoch == 1]
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))
    assert np.array_equal(feed.sample_ids(0), first[0])  # looking back is a look-up, too


def test_places_are_right_when_two_threads_ask_for_a_new_epoch_at_once(corpus):
    feed = open_feed(packed_keys(corpus, steps=100), PACKED_COLUMNS)
    expected = [feed.place(step) for step in range(100)]
    feed = open_feed(packed_keys(corpus, steps=100), PACKED_COLUMNS)
    plans, both = feed.workload.plans, threading.Barrier(2)
    make = plans.epoch

    def slow_epoch(epoch):
        # Two threads that plan the same epoch meet here; one alone goes on after a moment.
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.05)
        both.reset()
        return make(epoch)

    plans.epoch = slow_epoch
    threads = [threading.Thread(target=feed.place, args=(20,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plans.epoch = make
    assert [feed.place(step) for step in range(100)] == expected


def test_figures_of_dynamic_batches_count_what_mindformers_pads_to(corpus):
    feed = open_feed(padded_keys(corpus, pad_to="batch", divisor=64, remainder=1), PACKED_COLUMNS[:3], 4, 0, 2)
    lengths = np.asarray(feed.workload.store.train.lengths)
    plan = feed.workload.plans.epoch(0)
    rows = [-(-(int(lengths[plan.micro_batch(2, 0, rank)].max()) - 1) // 64) * 64 + 1 for rank in (0, 1)]
    figures = feed.figures(2)
    assert figures["tokens_computed"] == 4 * sum(rows)
    assert figures["pad_ratio"] == 1 - int(lengths[plan.step_ids(2)].sum()) / (4 * sum(rows))


def test_figures_count_all_ranks(corpus):
    feed = open_feed(packed_keys(corpus), PACKED_COLUMNS, 1, 0, 2)
    figures = feed.figures(0)
    lengths = np.asarray(feed.workload.store.train.lengths)[feed.sample_ids(0)]
    assert figures["tokens_computed"] == 2 * 2048
    assert figures["tokens_real"] == lengths.sum()
    assert figures["tokens_supervised"] == (lengths - 1).sum()
    assert figures["segments"] == lengths.size
    assert figures["pad_ratio"] == 1 - lengths.sum() / 4096
    assert 0 <= figures["imbalance"] < 1
    assert feed.ledger(feed.steps)["tokens"]["balanced"]


def test_a_prepared_store_gives_the_same_rows(corpus):
    from_text = open_feed(packed_keys(corpus), PACKED_COLUMNS)
    keys = packed_keys(corpus, store=str(from_text.workload.store.folder), longest_sample=2048)
    del keys["data"]
    from_store = open_feed(keys, PACKED_COLUMNS)
    for index in (0, 1):
        for name, values in from_text.row(index).items():
            np.testing.assert_array_equal(values, from_store.row(index)[name])
    with pytest.raises(DataError, match=r"must hold samples of at most 100 tokens, got one of .* raise longest_sample"):
        open_feed({**keys, "longest_sample": 100}, PACKED_COLUMNS)


def test_a_store_that_is_none_or_has_longer_samples_than_a_row_is_refused(corpus, tmp_path):
    store = open_feed(packed_keys(corpus), PACKED_COLUMNS).workload.store
    keys = {"store": str(store.folder), "mode": "padded", "seq_length": store.train.longest}
    assert open_feed(keys, PACKED_COLUMNS[:3], 2).row(0)["input_ids"].size == store.train.longest
    with pytest.raises(DataError, match=r"must hold samples of at most 64 tokens, got one of .* raise seq_length"):
        open_feed({**keys, "seq_length": 64}, PACKED_COLUMNS[:3], 2)
    for none in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"must be the folder of a prepared token store, got .*, which is none"):
            open_feed({**keys, "store": str(none)}, PACKED_COLUMNS[:3], 2)


def test_the_loader_is_a_data_set_that_skips_to_a_step(corpus):
    columns, keys = list(PACKED_COLUMNS), packed_keys(corpus, steps=9)
    feed = open_feed(keys, columns, 2, 1, 2)
    dataset = VarlenDataLoader(column_names=columns, num_shards=2, shard_id=1, batch_size=2, **keys)
    remembered = remembered_feed()
    assert remembered is not None
    assert remembered.workload.plans.fingerprint == feed.workload.plans.fingerprint
    batched = dataset.batch(2, drop_remainder=True)
    assert batched.get_dataset_size() == 9
    batched.set_init_step(6)  # what MindFormers does when it goes on after step 6
    batches = list(batched.create_dict_iterator(num_epochs=1, output_numpy=True))
    assert len(batches) == 3
    for step, batch in enumerate(batches, start=6):
        for name in columns:
            np.testing.assert_array_equal(batch[name], [feed.row(2 * step)[name], feed.row(2 * step + 1)[name]])


def test_the_loaders_faults_survive_mindformers_making_the_error_again(corpus):
    with pytest.raises(DataError, match=r"2 faults\n  handler: .*\n  seq_length: ") as caught:
        VarlenDataLoader(column_names=None, dataset_dir=None, data=corpus, seq_length=1, handler=[])
    assert "handler" in str(type(caught.value)(f"VarlenDataLoader: {caught.value}"))


def test_rows_for_dynamic_batches_are_as_long_as_their_samples(corpus):
    feed = open_feed(padded_keys(corpus, pad_to="batch", window=32, divisor=64, remainder=1), PACKED_COLUMNS[:3], 4)
    lengths = np.asarray(feed.workload.store.train.lengths)
    for step in (0, 3):
        rows = [feed.row(4 * step + row) for row in range(4)]
        assert [row["input_ids"].size for row in rows] == lengths[feed.sample_ids(step)].tolist()
        assert all(row["loss_mask"].sum() == row["input_ids"].size - 1 for row in rows)
