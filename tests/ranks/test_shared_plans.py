import multiprocessing
import os
import tempfile

import numpy as np
import pytest

from ms_varlen.errors import DataError
from ms_varlen.planning.batches import Batches
from ms_varlen.planning.plan import EpochPlans, PlanSettings
from ms_varlen.ranks.shared_plans import plans_of_node

SETTINGS = PlanSettings("token_budget", size=64, max_segments=8, micro_batches=1, seed=0, world_size=2)
LENGTHS = np.random.default_rng(0).integers(1, 60, 200).astype(np.int32)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_shared_plan_is_the_plan_and_is_made_once(temporary):
    alone = EpochPlans(LENGTHS, "f", SETTINGS)
    made = []
    with plans_of_node(os.getpid()) as share:

        def counted(name, make):
            return share(name, lambda: (made.append(name), make())[1])

        for _ in range(3):
            plans = EpochPlans(LENGTHS, "f", SETTINGS, counted)
            for epoch in (0, 1):
                np.testing.assert_array_equal(plans.epoch(epoch).batches.order, alone.epoch(epoch).batches.order)
                np.testing.assert_array_equal(plans.epoch(epoch).batches.offsets, alone.epoch(epoch).batches.offsets)
        state = alone.to_dict(alone.after(alone.start()))
        more = EpochPlans(LENGTHS, "f", SETTINGS.__class__(**{**SETTINGS.__dict__, "size": 80}), counted)
        rest = more.epoch(more.resume_changed(state).epoch)
        assert sorted([*rest.batches.order, *alone.epoch(0).trained_ids(1)]) == list(range(200))
    assert len(made) == len(set(made)) == 3
    assert not list(temporary.iterdir())
    assert rest.batches.order[0] >= 0  # mapped arrays outlive their files


def plan_in_child(launcher, folder, barrier, made):
    tempfile.tempdir = str(folder)
    with plans_of_node(launcher) as share:
        barrier.wait()
        share("name", lambda: (made.put(1), Batches(np.arange(3), np.array([0, 3])))[1])
        barrier.wait()


def test_processes_at_once_make_one_plan(temporary):
    context = multiprocessing.get_context("fork")
    barrier, made = context.Barrier(3), context.Queue()
    children = [context.Process(target=plan_in_child, args=(os.getpid(), temporary, barrier, made)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 3
    assert made.get(timeout=5) == 1
    assert made.empty()


def test_the_last_rank_to_leave_removes_the_plans(temporary):
    batches = Batches(np.arange(3), np.array([0, 3]))
    with plans_of_node(999999999) as last:  # of an msrun that was killed, too
        last("name", lambda: batches)
        with plans_of_node(999999999) as first:
            first("name", lambda: pytest.fail("made twice"))
        with plans_of_node(os.getpid()):  # another run begins
            pass
        last("name", lambda: pytest.fail("made twice"))
    assert not list(temporary.iterdir())


def test_leftovers_of_dead_runs_are_removed(temporary):
    (temporary / f"ms_varlen-plans-{os.getuid()}-999999999").mkdir()
    (temporary / f"ms_varlen-plans-{os.getuid()}-{os.getppid()}").mkdir()
    with plans_of_node(os.getpid()):
        pass
    assert [path.name for path in temporary.iterdir()] == [f"ms_varlen-plans-{os.getuid()}-{os.getppid()}"]


def test_no_room_for_the_plan_is_reported(temporary, monkeypatch):
    monkeypatch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with (
        plans_of_node(os.getpid()) as share,
        pytest.raises(DataError, match=r"plan must be written .*No space left on device; free space in .* TMPDIR"),
    ):
        share("name", lambda: Batches(np.arange(3), np.array([0, 3])))
