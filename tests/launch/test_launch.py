import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ms_varlen.errors import VarlenError
from ms_varlen.launch import launch
from ms_varlen.launch.__main__ import main
from ms_varlen.launch.cluster import TRAIN_SCRIPT, Cluster
from ms_varlen.launch.launch import Launch, failed_worker, first_cause, first_error
from ms_varlen.ranks import stop as stops
from ms_varlen.ranks.stop import StopRequest
from ms_varlen.train.bad_steps import check_bad_steps, culprits

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"

TRACEBACK = """some line
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
  File "b.py", line 2, in f
TypeError: one thing
error: and ours after it
"""


def test_variables_match_mindformers():
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


def test_a_faulty_recipe_is_reported_before_anything_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["nowhere.yaml", "2"]) == 1
    assert "nowhere.yaml" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.fixture
def restored_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_at_one_time_are_one_request_and_a_later_one_interrupts(monkeypatch, restored_signals):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    stop = StopRequest()
    stop.listen(rank=1)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # from the system, the launcher and the terminal
        signal.raise_signal(number)
    assert (stop.asked, stop.number) == (True, signal.SIGTERM)
    monkeypatch.setattr(stops, "SAME_REQUEST_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_msrun_signal_handlers_are_unchanged(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    StopRequest().listen(rank=0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_too_many_bad_steps_stop_the_run():
    check_bad_steps(3, most=3)
    with pytest.raises(VarlenError, match=r"at most 3 \(train.max_bad_steps\), got 4 since .*bad_step_\*\.json"):
        check_bad_steps(4, most=3)


def test_micro_batches_with_a_loss_or_gradient_that_is_not_finite_are_named():
    losses, gradients = np.array([[1.0, 2.0], [np.nan, 1.0]]), np.array([[True, True], [True, False]])
    assert culprits(losses, gradients) == (
        "rank 1, micro-batch 0 (loss nan, its gradient is finite); "
        "rank 1, micro-batch 1 (loss 1, its gradient is not finite)"
    )
    assert culprits(losses[:1], gradients[:1]) == (
        "computed again, each micro-batch is finite: their sum is not, or the fault does not repeat"
    )


def test_of_many_micro_batches_that_are_not_finite_some_are_named():
    assert culprits(np.full((10, 1), np.inf), np.ones((10, 1), bool)).endswith("its gradient is finite) and 2 more")


@pytest.mark.parametrize(
    ("workers", "environment", "message"),
    [
        (0, {}, "N must be at least 1, got 0"),
        (2, {"LOCAL_WORKER": "4"}, r"LOCAL_WORKER must be at most N \(2\), got 4"),
        (2, {"LOCAL_WORKER": "0"}, "LOCAL_WORKER must be at least 1, got 0"),
        (2, {"MASTER_PORT": "abc"}, "MASTER_PORT must be a number, got 'abc'"),
        (2, {"MASTER_PORT": "70000"}, "MASTER_PORT must be at most 65535, got 70000"),
        (2, {"STOP_SECONDS": "nan"}, "STOP_SECONDS must be at least 0, got nan"),
        (2, {"NODE_RANK": "1"}, r"LOCAL_WORKER must be less than N \(2\) on several nodes, got NODE_RANK=1 and"),
        (4, {"NODE_RANK": "2", "LOCAL_WORKER": "2"}, r"NODE_RANK must leave LOCAL_WORKER \(2\) of the N \(4\) .*got 2"),
    ],
)
def test_wrong_variables_are_refused(workers, environment, message):
    with pytest.raises(VarlenError, match=message):
        Cluster.from_environment(workers, environment)


def test_overrides_without_dashes_get_a_hint(capsys):
    for arguments in (["r.yaml", "2", "train.steps=3"], ["r.yaml", "train.steps=3"]):
        with pytest.raises(SystemExit):
            main(arguments)
        err = capsys.readouterr().err
        assert "put -- before overrides" in err
        assert err.count("\n") == 1


def test_taken_port_is_refused_before_logs_are_touched(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.setenv("LOG_DIR", str(tmp_path / "log"))
        assert main([str(RECIPE), "2"]) == 1
    assert f"MASTER_PORT must be free, got {port} in use; set another" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("node", "address", "message"),
    [
        (
            0,
            "127.0.0.1",
            r"got 127.0.0.1, the loopback address of this machine, with NODE_RANK=0; set both on every node",
        ),
        (1, "127.0.0.1", r"got 127.0.0.1, the loopback address of this machine, with NODE_RANK=1"),
        (0, "192.0.2.7", r"got 192.0.2.7, no address of this machine, with NODE_RANK=0"),  # RFC 5737: nobody's
    ],
)
def test_an_address_at_which_nodes_cannot_meet_is_refused(node, address, message):
    variables = {"LOCAL_WORKER": "1", "NODE_RANK": str(node), "MASTER_ADDR": address}
    with pytest.raises(VarlenError, match=f"MASTER_ADDR must be node 0's address that all nodes reach, {message}"):
        Cluster.from_environment(2, variables).check_address()


def test_an_address_of_another_machine_is_allowed_on_node_1():
    variables = {"LOCAL_WORKER": "1", "NODE_RANK": "1", "MASTER_ADDR": "192.0.2.7"}
    Cluster.from_environment(2, variables).check_address()


def test_the_log_dir_of_a_running_launch_is_refused(tmp_path):
    cluster = Cluster.from_environment(2, {"LOG_DIR": str(tmp_path)})
    (tmp_path / "worker_5.log").write_text("of an earlier run")
    with cluster.take_log_dir():
        assert not (tmp_path / "worker_5.log").exists()
        cluster.log_of(0).write_text("mine")
        with pytest.raises(VarlenError, match=rf"belong to a running launch, pid {os.getpid()}; set LOG_DIR"):
            cluster.take_log_dir()
        assert cluster.log_of(0).read_text() == "mine"
    cluster.take_log_dir().close()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_log_dir_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOG_DIR", str(tmp_path / name))
    monkeypatch.setattr(Cluster, "check_address", lambda _: None)
    assert main([str(RECIPE), "2"]) == 1
    assert re.fullmatch(
        r"error: LOG_DIR must be a folder that can be written to, got \S+ \(.*\); set another\n",
        capsys.readouterr().err,
    )


def test_nodes_that_share_a_log_dir_keep_each_others_logs(tmp_path):
    nodes = [
        Cluster.from_environment(4, {"LOG_DIR": str(tmp_path), "LOCAL_WORKER": "2", "NODE_RANK": str(node)})
        for node in range(2)
    ]
    with nodes[0].take_log_dir():
        nodes[0].log_of(1).write_text("node 0")
        nodes[0].scheduler_log.write_text("node 0")
        nodes[1].take_log_dir().close()
        assert nodes[0].log_of(1).is_file()
        assert nodes[0].scheduler_log.is_file()


def test_failed_worker_is_the_first_of_msruns_log():
    log = (
        "Worker process 7 exit with exception. Error code: 1.\nWorker process 9 exit with exception. Error code: -9.\n"
    )
    assert failed_worker(log, {7: 0, 9: 1}) == (1, 0)
    assert failed_worker(log, {9: 1}) == (1, None)  # it exited before it was found
    assert failed_worker("all is well", {9: 1}) == (0, None)


def test_the_cause_is_reported_before_follow_up_errors(tmp_path):
    logs = {}
    for rank, text in enumerate(
        [
            "error: rank 2 stopped, and with it all others: x\n",
            "error: rank 2 must answer the others, and is gone (reset)\n",
            "error: disk is full\n",
        ]
    ):
        logs[f"rank {rank}"] = tmp_path / f"worker_{rank}.log"
        logs[f"rank {rank}"].write_text(text)
    assert first_cause(logs) == ("rank 2", "error: disk is full")
    del logs["rank 2"]
    assert first_cause(logs) == ("rank 0", "error: rank 2 stopped, and with it all others: x")
    assert first_cause({}) is None


def test_the_training_script_exits_if_msrun_is_dead():
    environment = {**os.environ, "MS_ROLE": "MS_WORKER", "MS_VARLEN_MSRUN_PID": "1"}
    done = subprocess.run(
        [sys.executable, TRAIN_SCRIPT, RECIPE], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "msrun (pid 1) died before" in done.stderr


# Starts a scheduler and a worker as msrun does, and logs a failed worker as msrun does. When the launcher first sees
# the worker, its environment is not set yet, as between fork and exec.
MSRUN = """
import os, subprocess, sys, time
scheduler = subprocess.Popen([sys.executable, "-c", SCHEDULER], env={**os.environ, "MS_ROLE": "MS_SCHED"})
late = 'sleep 0.4; exec env MS_ROLE=MS_WORKER RANK_ID=0 "$@"'
worker = subprocess.Popen(["sh", "-c", late, "sh", sys.executable, "-c", WORKER], start_new_session=True)
while worker.poll() is None:
    time.sleep(0.05)
if worker.returncode:
    print(f"Worker process {worker.pid} exit with exception. Error code: {worker.returncode}.", flush=True)
    scheduler.kill()
sys.exit(scheduler.wait() or worker.returncode)
"""
WAITING = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def launched(tmp_path, monkeypatch, scheduler, worker):
    script = MSRUN.replace("SCHEDULER]", f"{scheduler!r}]").replace("WORKER]", f"{worker!r}]")
    monkeypatch.setattr(Cluster, "command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(launch, "NOTHING_TO_SAVE_SECONDS", 1)
    return Launch(Cluster.from_environment(1, {"LOG_DIR": str(tmp_path)}), [])


def test_a_signal_while_ranks_start_is_no_error_and_needs_no_long_wait(tmp_path, monkeypatch, capsys):
    launch = launched(tmp_path, monkeypatch, WAITING, DEAF)
    begin = time.monotonic()
    launch.ask_to_stop(signal.SIGTERM)
    assert launch.wait() == 143
    assert time.monotonic() - begin < 10
    assert "stopped on SIGTERM before the first step; nothing to save" in capsys.readouterr().err


def test_a_scheduler_that_fails_stops_the_ranks(tmp_path, monkeypatch, capsys):
    launch = launched(tmp_path, monkeypatch, "import time; time.sleep(1); raise OSError('no port')", DEAF)
    (tmp_path / "scheduler.log").write_text("Traceback (most recent call last):\n  x\nOSError: no port\n")
    assert launch.wait() == 1
    err = capsys.readouterr().err
    assert "the scheduler failed" in err
    assert "first error of the scheduler: OSError: no port" in err


def test_ranks_that_succeeded_are_no_failure_though_the_scheduler_lingers(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "SCHEDULER_SECONDS", 1)
    assert launched(tmp_path, monkeypatch, WAITING, "import time; time.sleep(1)").wait() == 0


def test_a_killed_worker_is_named_though_it_was_first_seen_without_its_environment(tmp_path, monkeypatch, capsys):
    launch = launched(tmp_path, monkeypatch, WAITING, "import os, time; time.sleep(1); os.kill(os.getpid(), 9)")
    assert launch.wait() == 137
    err = capsys.readouterr().err
    assert "rank 0 was killed by SIGKILL (the system does so when memory runs out, see dmesg)" in err
    assert "no log holds" not in err


def test_what_a_rank_started_does_not_outlive_it(tmp_path, monkeypatch):
    started = tmp_path / "pid"
    worker = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '60']); "
        f"open({str(started)!r}, 'w').write(str(child.pid)); time.sleep(1); raise SystemExit(3)"
    )
    assert launched(tmp_path, monkeypatch, WAITING, worker).wait() == 3
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.read_text())).wait(5)


@pytest.mark.parametrize(("status", "asked", "expected"), [(0, True, 0), (3, True, 3), (0, False, 143)])
def test_if_everything_is_stopped_at_once_the_ranks_decide(tmp_path, monkeypatch, status, asked, expected):
    # `scancel` and `docker stop` signal every process: msrun is dead while ranks still save.
    saves = f"import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit({status}))); "
    launch = launched(tmp_path, monkeypatch, WAITING, saves + "print('rank 0 of 1', flush=True); time.sleep(60)")
    end = time.monotonic() + 10
    while not launch._workers:
        launch._find_processes()
        assert time.monotonic() < end
        time.sleep(0.05)
    (tmp_path / "worker_0.log").write_text("rank 0 of 1")
    time.sleep(0.5)
    if asked:
        launch.ask_to_stop(signal.SIGTERM)
    launch._msrun.terminate()
    for worker in launch._workers.values():
        worker.terminate()
    assert launch.wait() == expected


def test_an_unknown_error_is_shown_by_the_last_lines_of_its_log(tmp_path, monkeypatch, capsys):
    launch = launched(tmp_path, monkeypatch, WAITING, "import time; time.sleep(1); raise SystemExit(2)")
    (tmp_path / "worker_0.log").write_text("Usage: x\n\nNo such option: --jsn\n[INFO] DISTRIBUTED\n")
    assert launch.wait() == 2
    assert capsys.readouterr().err.endswith("last lines of rank 0:\nUsage: x\nNo such option: --jsn\n")


def test_msrun_dies_with_a_killed_launcher(tmp_path):
    code = (
        "import os, signal, sys\nfrom ms_varlen.launch.launch import Launch\n"
        "from ms_varlen.launch.cluster import Cluster\n"
        "Cluster.command = lambda *_: [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        f"launch = Launch(Cluster.from_environment(1, {{'LOG_DIR': {str(tmp_path)!r}}}), [])\n"
        "print(launch._msrun.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    end = time.monotonic() + 5
    while psutil.pid_exists(pid := int(done.stdout)) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
