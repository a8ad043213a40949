import json
from pathlib import Path

import numpy as np
import pytest

from ms_varlen.bridge.config import PACKED_COLUMNS
from ms_varlen.bridge.feed import Feed, open_feed
from ms_varlen.bridge.saved import check_plan, saved_plan_state, set_aside
from ms_varlen.errors import CheckpointError
from tests.support.bridge_cases import packed_keys, padded_keys, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_run(folder: Path, feed: Feed, steps: int) -> None:
    """The files that the monitor leaves."""
    plan = {
        "plan_fingerprint": feed.workload.plans.fingerprint,
        "data_fingerprint": feed.workload.store.fingerprint,
        "settings": feed.plan_state(0)["settings"],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    lines = [{"step": step, "place": vars(feed.place(step))} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_step_count_of_mindformers_is_a_place_in_our_plan(corpus, tmp_path):
    feed = open_feed(packed_keys(corpus, steps=40), PACKED_COLUMNS)
    write_run(tmp_path, feed, 40)
    for steps in (0, 1, 7, 40):
        state = saved_plan_state(tmp_path, steps)
        assert state == json.loads(json.dumps(feed.plan_state(steps)))
        assert feed.workload.plans.resume(state) == feed.place(steps)
    with pytest.raises(CheckpointError, match="must hold step 41"):
        saved_plan_state(tmp_path, 41)


def check(folder: Path, feed: Feed, steps: int) -> None:
    check_plan(folder, steps, feed.workload.plans, feed.place(steps), feed.workload.store.fingerprint)


@pytest.mark.parametrize(
    ("changes", "batch_size", "changed"),
    [
        ({"seed": 1}, 2, "data_loader.seed: was 0, is 1"),
        ({}, 4, "runner_config.batch_size: was 2, is 4"),
        ({"mode": "varlen"}, 2, "data_loader.mode: was packed, is token_budget"),
        ({"compressed_eod_mask_length": 8}, 2, "data_loader.compressed_eod_mask_length: was 127, is 7"),
    ],
)
def test_going_on_where_a_step_means_other_samples_is_refused(corpus, tmp_path, changes, batch_size, changed):
    feed = open_feed(packed_keys(corpus, steps=9), PACKED_COLUMNS, 2)
    write_run(tmp_path, feed, 9)
    other = open_feed(packed_keys(corpus, **{"steps": 9, **changes}), PACKED_COLUMNS, batch_size)
    with pytest.raises(CheckpointError, match=f"step 3 means other samples .*{changed}.*no_load_optim: True"):
        check(tmp_path, other, 3)


def test_going_on_with_other_data_or_without_the_runs_files_is_refused(corpus, tmp_path):
    feed = open_feed(packed_keys(corpus), PACKED_COLUMNS)
    write_run(tmp_path, feed, 1)
    plans, place = feed.workload.plans, feed.place(1)
    check(tmp_path, feed, 1)
    with pytest.raises(CheckpointError, match=r"data.source .*plan.json .*start from scratch from the weights alone"):
        check_plan(tmp_path, 1, plans, place, "0" * 32)
    with pytest.raises(CheckpointError, match="must be there to go on from a step of MindFormers"):
        check_plan(tmp_path / "nowhere", 1, plans, place, "")


@pytest.mark.parametrize("mode", ["packed", "varlen"])
def test_as_many_rows_a_step_on_other_ranks_resume_with_each_sample_once(corpus, tmp_path, mode):
    keys = packed_keys(corpus, mode=mode)
    two_ranks = open_feed(keys, PACKED_COLUMNS, 1, 0, 2)
    write_run(tmp_path, two_ranks, two_ranks.steps)
    one_rank = open_feed(keys, PACKED_COLUMNS, 2)
    middle = two_ranks.steps // 2
    assert 0 < middle < one_rank.steps == two_ranks.steps
    check(tmp_path, one_rank, middle)
    trained = [two_ranks.sample_ids(step) for step in range(middle)]
    trained += [one_rank.sample_ids(step) for step in range(middle, one_rank.steps)]
    ids = np.concatenate(trained)
    assert np.array_equal(np.sort(ids), np.sort(two_ranks.workload.plans.epoch(0).trained_ids(two_ranks.steps)))


def test_padded_rows_on_other_ranks_are_refused(corpus, tmp_path):
    two_ranks = open_feed(padded_keys(corpus), PACKED_COLUMNS[:3], 2, 0, 2)
    write_run(tmp_path, two_ranks, two_ranks.steps)
    with pytest.raises(
        CheckpointError, match=r"runner_config.batch_size: was 2, is 4; number of data-parallel ranks: was"
    ):
        check(tmp_path, open_feed(padded_keys(corpus), PACKED_COLUMNS[:3], 4), 3)


def test_the_line_that_a_kill_left_half_written_is_no_step(corpus, tmp_path):
    feed = open_feed(packed_keys(corpus), PACKED_COLUMNS)
    write_run(tmp_path, feed, 2)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "pl')
    assert saved_plan_state(tmp_path, 2)["step"] == 2
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"metrics.jsonl must hold step 3"):
            saved_plan_state(tmp_path, 3)
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)


def test_files_of_an_earlier_run_are_set_aside(tmp_path):
    metrics, plan = tmp_path / "metrics.jsonl", tmp_path / "plan.json"
    assert set_aside(metrics, plan) == []
    for run in ("first", "second"):
        metrics.write_text(run)
        plan.write_text(run)
        kept = set_aside(metrics, plan)
    assert [path.name for path in kept] == ["metrics.2.jsonl", "plan.2.json"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "metrics.1.jsonl": "first",
        "plan.1.json": "first",
        "metrics.2.jsonl": "second",
        "plan.2.json": "second",
    }
