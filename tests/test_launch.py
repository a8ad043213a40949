import signal
from pathlib import Path

import pytest

from ms_varlen.errors import VarlenError
from ms_varlen.train.bad_steps import Skipped, check_bad_steps
from ms_varlen.train.launch import Cluster, first_error, main
from ms_varlen.train.ranks import Ranks, StopRequest

TRACEBACK = """some line
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
  File "b.py", line 2, in f
TypeError: one thing
error: and ours after it
"""


def test_variables_are_those_of_mindformers():
    cluster = Cluster.from_environment(8, {})
    assert (cluster.master_addr, cluster.master_port, str(cluster.log_dir)) == ("127.0.0.1", 8118, "output/msrun_log")
    assert (cluster.local_workers, cluster.node_rank, cluster.cluster_time_out) == (8, 0, 7200)
    assert cluster.log_of(3) == Path("output/msrun_log/worker_3.log")


def test_second_node_runs_the_other_half_of_the_ranks():
    environment = {"LOCAL_WORKER": "8", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9000"}
    cluster = Cluster.from_environment(16, environment)
    assert cluster.first_rank == 8
    command = cluster.command(["r.yaml", "train.steps=2"])
    assert command[3:9] == [
        "--worker_num=16",
        "--local_worker_num=8",
        "--master_addr=10.0.0.1",
        "--master_port=9000",
        "--node_rank=1",
        "--log_dir=output/msrun_log",
    ]
    assert command[-2:] == ["r.yaml", "train.steps=2"]
    assert Path(command[-3]).is_file()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (TRACEBACK, "TypeError: one thing"),
        (
            "x\nerror: recipe: 2 faults\n  a: wrong\n  b: wrong\nmore\n",
            "error: recipe: 2 faults\n  a: wrong\n  b: wrong",
        ),
        ("INFO no error here\n", None),
    ],
)
def test_first_error_of_a_log(tmp_path, text, error):
    (tmp_path / "worker_0.log").write_text(text)
    assert first_error(tmp_path / "worker_0.log") == error
    assert first_error(tmp_path / "none.log") is None


def test_faulty_recipe_is_told_before_anything_is_started(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["nowhere.yaml", "2"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_first_signal_asks_and_the_second_interrupts(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    with stop.listening(Ranks(1, 2)):
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_alone_signals_are_left_as_they_are(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest().listening(Ranks()):
        assert signal.getsignal(signal.SIGTERM) == before


def test_too_many_bad_steps_stop_the_run():
    check_bad_steps(Skipped(steps=3), most=3)
    with pytest.raises(VarlenError, match=r"at most 3 \(train.max_bad_steps\), got 4: .*bad_step_\*\.json"):
        check_bad_steps(Skipped(steps=4), most=3)
