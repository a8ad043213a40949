"""What ranks tell each other, with threads in place of processes and no MindSpore."""

import socket
import threading
import time

import numpy as np
import pytest

from ms_varlen.errors import DataError, RanksError
from ms_varlen.planning.plan import PlanState
from ms_varlen.ranks import agreement as step_reports
from ms_varlen.ranks.agreement import StepCounts, StepLengths, StepPlace, StepReports
from ms_varlen.ranks.exchange import Exchange, Meeting, connect
from ms_varlen.ranks.join import Ranks

PLAN = "0123456789abcdef" * 2


def on_ranks(size, work):
    """What `work(exchange)` gives or raises on each of `size` connected ranks."""
    words = {}
    told = threading.Barrier(size)

    def gather_of(rank):
        def gather(own):
            words[rank] = own
            told.wait(10)
            return np.stack([words[other] for other in range(size)])

        return gather

    results = [None] * size

    def run(rank):
        exchange = connect(Ranks(rank, size), gather_of(rank), seconds=10)
        try:
            results[rank] = work(exchange)
        except Exception as error:
            results[rank] = error
        finally:
            for connection in exchange._connections:
                connection.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_every_rank_gets_what_every_rank_gave():
    found = on_ranks(3, lambda exchange: exchange.gather(bytes([exchange.ranks.rank]) * exchange.ranks.rank))
    assert found == [[b"", b"\1", b"\2\2"]] * 3
    floats = on_ranks(2, lambda exchange: exchange.gather_floats([exchange.ranks.rank + 0.1, float("nan")]).tobytes())
    assert floats[0] == floats[1] == np.array([[0.1, np.nan], [1.1, np.nan]]).tobytes()


def test_a_single_rank_waits_for_no_other():
    exchange = Exchange(Ranks())
    assert exchange.gather(b"x") == [b"x"]
    assert exchange.gather_words(np.array([3, 4], np.int32)).tolist() == [[3, 4]]
    assert exchange.together(lambda: 5) == 5


def test_an_error_of_one_rank_reaches_all():
    def work(exchange):
        def fails():
            if exchange.ranks.rank == 1:
                raise DataError("record 7 must be whole")

        exchange.together(fails)

    first, second, third = on_ranks(3, work)
    assert (type(second), str(second)) == (DataError, "record 7 must be whole")
    for other in (first, third):
        assert type(other) is RanksError
        assert str(other) == "rank 1 stopped, and with it all others: record 7 must be whole"


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_is_named_by_all_that_are_left(dead):
    def work(exchange):
        exchange.gather(b"")
        if exchange.ranks.rank == dead:
            return None
        begin = time.monotonic()
        with pytest.raises(RanksError, match=rf"rank {dead} must answer the others, and is gone .*worker_{dead}.log"):
            exchange.gather(b"")
        return time.monotonic() - begin

    found = on_ranks(3, work)
    assert max(seconds for rank, seconds in enumerate(found) if rank != dead) < 5


def test_a_rank_that_does_not_answer_is_waited_for_so_long():
    here, there = socket.socketpair()
    here.settimeout(0.1)
    with here, there, pytest.raises(RanksError, match=r"rank 1 must answer the others, and is gone \(timed out\)"):
        Exchange(Ranks(0, 2), [here]).gather(b"")


def test_a_meeting_survives_the_words_of_an_all_gather():
    meeting = Meeting("fe80::1234:5678:9abc:def0%eth0", 65535, bytes(range(16)))
    assert Meeting.from_words(meeting.to_words()) == meeting
    assert meeting.to_words().size == Meeting("", 0, b"").to_words().size


def test_differences_name_rank_and_keys():
    def work(exchange):
        odd = exchange.ranks.rank == 2
        exchange.agree({"recipe": {"train": {"seed": odd + 0}}, "plan": "a"})

    found = on_ranks(3, work)
    assert {str(error) for error in found} == {
        "all ranks must train the same, but on rank 2 recipe.train.seed is 1, on rank 0 0; start every rank with the "
        "same recipe, on the same corpus"
    }


def lengths(*micro_batches, supervised=None):
    counts = [len(batch) for batch in micro_batches]
    tokens = [sum(batch) + 1 for batch in micro_batches]
    return StepLengths(
        np.concatenate([np.array(batch, np.int32) for batch in micro_batches]),
        np.append(0, np.cumsum(counts)),
        np.array(tokens),
        np.array(supervised or [sum(batch) for batch in micro_batches]),
    )


PLANNED = lengths([3, 4], [5], [9, 1, 1], [2])


def reported(*ranks, most=8, step=6):
    """What two ranks with these micro-batches find, the plan being `PLANNED`."""

    def work(exchange):
        given = ranks[exchange.ranks.rank]
        at = step + (exchange.ranks.rank if isinstance(given, int) else 0)
        place = StepPlace(at, PlanState(1, 2), "varlen", PLAN)
        mine = (lengths([3, 4], [5]), lengths([9, 1, 1], [2]))[exchange.ranks.rank] if isinstance(given, int) else given
        return StepReports(exchange, 2, most).check(place, mine, PLANNED, stop=given == 1)

    return on_ranks(2, work)


def test_counts_of_a_step_are_those_of_all_ranks():
    mine = (lengths([3, 4], [5], supervised=[6, 1]), lengths([9, 1, 1], [2], supervised=[0, 0]))
    counts = StepCounts(real=25, computed=29, supervised=7, segments=7, stop=False)
    assert reported(*mine) == [counts, counts]


@pytest.mark.parametrize("limit", [step_reports.MOST_LENGTHS, 1])
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lengths([9, 1, 1], [3]), "T must be 3 as planned, got 4, in its micro-batch 1"),
        (lengths([1, 9, 1], [2]), "seq_lens[0] must be 9 as planned, got 1, in its micro-batch 0"),
        (lengths([9, 1], [2]), "samples must be 3 as planned, got 2, in its micro-batch 0"),
    ],
)
def test_other_lengths_than_planned_stop_all_ranks(other, difference, limit, monkeypatch):
    monkeypatch.setattr(step_reports, "MOST_LENGTHS", limit)
    if limit == 1 and "seq_lens" in difference:
        difference = "the lengths must be those of the plan, got others (their hashes differ), in its micro-batch 0"
    found = reported(lengths([3, 4], [5]), other)
    assert {type(error) for error in found} == {RanksError}
    assert {str(error) for error in found} == {
        f"step 7: rank 1 has other data than the plan gives it: {difference}; all ranks stop; give every rank the same "
        "token store, and change nothing on the way to the graph"
    }


def test_a_rank_at_another_step_stops_all():
    found = reported(0, 1)
    assert {str(error).partition("; ")[0] for error in found} == {
        "step 7: all ranks must be at one place, but step is 7 on rank 1 and 6 on rank 0"
    }


def test_a_rank_without_its_micro_batches_tells_why():
    first, second = reported(lengths([3, 4], [5]), DataError("record 7 must be whole"))
    assert str(second) == "record 7 must be whole"
    assert str(first) == "rank 1 stopped, and with it all others: record 7 must be whole"


def test_one_rank_that_is_asked_stops_all():
    def work(exchange):
        place = StepPlace(0, PlanState(0, 0), "packed", PLAN)
        mine = (lengths([3, 4], [5]), lengths([9, 1, 1], [2]))[exchange.ranks.rank]
        return StepReports(exchange, 2, 8).check(place, mine, PLANNED, stop=exchange.ranks.rank == 1).stop

    assert on_ranks(2, work) == [True, True]
