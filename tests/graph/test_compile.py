import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ms_varlen
from ms_varlen.errors import RecipeError, ShapesError
from ms_varlen.graph import compile_cache as cache_module
from ms_varlen.graph.compile_cache import KEPT_ENTRIES, MARKER, compile_cache, fingerprint
from ms_varlen.graph.compile_watch import CompileWatch

RUN = Path(__file__).parents[1] / "support" / "compile_run.py"
LOADED = "Use the compilation cache"  # MindSpore says so once per graph that it loads


def cell(*phases):
    return types.SimpleNamespace(compile_cache=set(phases))


@pytest.fixture
def new_process(monkeypatch, tmp_path):
    """The state of a process that has not used the cache yet."""
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(cache_module, "_process_used_it", False)
    for name in ("MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH", "MS_DEV_FORCE_USE_COMPILE_CACHE"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def store_graph(number=0):
    """What MindSpore does when it compiles."""
    assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "1"
    folder = Path(os.environ["MS_COMPILER_CACHE_PATH"]) / "rank_0" / "graph_cache"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"compile_cache_{number}.mindir").write_bytes(b"graph")


def keep(root, name, monkeypatch):
    monkeypatch.setattr(cache_module, "_process_used_it", False)
    with compile_cache(str(root), name) as cache:
        if cache.state == "cold":
            store_graph()
    return cache.state


def test_predicted_graphs_are_normal_and_others_are_warned_of_once(caplog):
    cells = {"train": cell(), "apply": cell(), "eval": cell()}
    watch = CompileWatch(
        {role: (one,) for role, one in cells.items()}, {"train": 1, "apply": 1, "eval": 1}, max_graphs=3
    )
    caplog.set_level(logging.INFO, "ms_varlen")
    cells["train"].compile_cache.add("a")
    assert watch.check("T=64..256 by 64") == {"train": 1, "apply": 0, "eval": 0}
    cells["apply"].compile_cache.add("b")
    watch.check("learning rate")
    cells["train"].compile_cache.add("c")
    assert watch.check("T=100") == watch.check("T=100") == watch.counts() == {"train": 2, "apply": 1, "eval": 0}
    assert [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records] == [
        ("INFO", "graph 1 of 3 (train), T=64..256 by 64, compiled, normal"),
        ("INFO", "graph 2 of 3 (apply), learning rate, compiled, normal"),
        ("WARNING", "train graph 2 compiled where 1 were predicted"),
    ]
    assert "T=100" in caplog.records[-1].getMessage()


def test_more_graphs_predicted_than_allowed_are_refused():
    with pytest.raises(ShapesError, match=r"graph.max_graphs \(4\), got 5 \(train 4, apply 1\); declare fewer sizes"):
        CompileWatch({"train": (cell(),), "apply": (cell(),)}, {"train": 4, "apply": 1}, max_graphs=4)


def test_watch_refuses_roles_without_a_prediction():
    with pytest.raises(ShapesError, match=r"must be those of cells \(\['train'\]\), got \['eval'\]"):
        CompileWatch({"train": (cell(),)}, {"eval": 1}, max_graphs=4)


def test_fingerprint_depends_on_every_part_and_on_the_order_of_shapes(tmp_path, monkeypatch):
    library = tmp_path / "kernels.so"
    library.write_bytes(b"1")
    names = [fingerprint(parts) for parts in ({"hidden": 8, "sizes": [1, 2]}, {"sizes": [1, 2], "hidden": 8})]
    assert names[0] == names[1]
    assert len(names[0]) == 64
    names = [names[0], fingerprint({"hidden": 8, "sizes": [2, 1]}), fingerprint({"hidden": 16, "sizes": [1, 2]})]
    names.append(fingerprint({"hidden": 8, "sizes": [1, 2]}, library))
    library.write_bytes(b"2")
    names.append(fingerprint({"hidden": 8, "sizes": [1, 2]}, library))
    names.append(fingerprint({"hidden": 8, "sizes": [1, 2]}, library.rename(tmp_path / "moved.so")))
    monkeypatch.setenv("RANK_SIZE", "2")
    names.append(fingerprint({"hidden": 8, "sizes": [1, 2]}))
    assert len(set(names)) == len(names) == 7
    monkeypatch.setenv("RANK_ID", "1")
    assert fingerprint({"hidden": 8, "sizes": [1, 2]}) == names[-1], "ranks share entries"


def test_ranks_share_the_entry_that_one_of_them_made(new_process, tmp_path, monkeypatch):
    root, seen = tmp_path / "cache", []

    def graphs(rank):
        monkeypatch.setenv("RANK_ID", rank)
        monkeypatch.setattr(cache_module, "_process_used_it", False)
        with compile_cache(str(root), "a") as cache:
            folder = Path(os.environ["MS_COMPILER_CACHE_PATH"]) / f"rank_{rank}" / "graph_cache"
            if cache.state == "cold":
                folder.mkdir()
                (folder / "compile_cache_0.mindir").write_bytes(rank.encode())
            seen.append((folder / "compile_cache_0.mindir").read_bytes())
        return cache.state

    assert [graphs(rank) for rank in ("3", "0", "1", "3")] == ["cold", "warm", "warm", "warm"]
    assert seen == [b"3"] * 4
    assert [path.name for path in root.iterdir()] == ["a"]
    assert [path.name for path in (root / "a").iterdir() if path.is_dir()] == ["rank_0"]


def test_entry_is_kept_then_found_again(new_process, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    assert [keep(root, "a", monkeypatch) for _ in range(2)] == ["cold", "warm"]
    assert keep(root, "b", monkeypatch) == "cold"
    assert sorted(path.name for path in root.iterdir()) == ["a", "b"]
    assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "0"
    assert "MS_COMPILER_CACHE_PATH" not in os.environ


def test_auto_lies_in_the_users_cache_folder(new_process, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with compile_cache("auto", "a") as cache:
        store_graph()
    assert cache.folder == tmp_path / "ms_varlen" / "compile_cache" / "a"
    assert (cache.folder / MARKER).is_file()


def test_failed_compilation_leaves_nothing(new_process, tmp_path):
    def compile_and_fail():
        with compile_cache(str(tmp_path / "cache"), "a"):
            store_graph()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        compile_and_fail()
    assert list((tmp_path / "cache").iterdir()) == []
    assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "0"


def test_first_of_two_runs_at_once_is_kept(new_process, tmp_path):
    root = tmp_path / "cache"
    with compile_cache(str(root), "a") as slow:
        store_graph()
        other = Path(shutil.copytree(os.environ["MS_COMPILER_CACHE_PATH"], root / "a.tmp-other"))
        cache_module._publish(other, root / "a")
        kept = (root / "a").stat().st_ino
    assert slow.state == "cold"
    assert [(path.name, path.stat().st_ino) for path in root.iterdir()] == [("a", kept)]


@pytest.mark.parametrize("fault", ["cut", "extra", "no marker", "missing"])
def test_entry_that_is_not_whole_is_made_again(new_process, tmp_path, monkeypatch, fault):
    root = tmp_path / "cache"
    keep(root, "a", monkeypatch)
    graph = root / "a" / "rank_0" / "graph_cache" / "compile_cache_0.mindir"
    if fault == "cut":
        graph.write_bytes(b"gra")
    elif fault == "extra":
        graph.with_name("compile_cache_1.mindir").write_bytes(b"graph")
    elif fault == "no marker":
        (root / "a" / MARKER).unlink()
    else:
        graph.unlink()
    assert [keep(root, "a", monkeypatch) for _ in range(2)] == ["cold", "warm"]
    assert sorted(path.name for path in root.iterdir()) == ["a"]


def test_entry_that_a_warm_run_added_graphs_to_is_removed(new_process, tmp_path, monkeypatch, caplog):
    root = tmp_path / "cache"
    keep(root, "a", monkeypatch)
    monkeypatch.setattr(cache_module, "_process_used_it", False)
    with compile_cache(str(root), "a") as cache:
        store_graph(number=1)
    assert cache.state == "warm"
    assert list(root.iterdir()) == []
    assert "more or other graphs were compiled than kept" in caplog.text


def test_nothing_stored_is_nothing_kept(new_process, tmp_path, caplog):
    with compile_cache(str(tmp_path / "cache"), "a"):
        pass
    assert list((tmp_path / "cache").iterdir()) == []
    assert "MindSpore stored no graph" in caplog.text


def test_old_remains_and_entries_beyond_the_limit_are_removed(new_process, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    old, new = root / "x.tmp-1", root / "x.tmp-2"
    for folder in [old, new, *(root / f"e{i:02}" for i in range(KEPT_ENTRIES + 2))]:
        folder.mkdir(parents=True)
    for i in range(KEPT_ENTRIES + 2):
        (root / f"e{i:02}" / MARKER).touch()
        os.utime(root / f"e{i:02}" / MARKER, (i, i))
    os.utime(old, (0, 0))
    keep(root, "a", monkeypatch)
    left = {path.name for path in root.iterdir()}
    assert left == {"a", "x.tmp-2", *(f"e{i:02}" for i in range(2, KEPT_ENTRIES + 2))}


@pytest.mark.parametrize(
    ("setting", "prepare", "reason"),
    [
        ("off", lambda patch: None, "graph.compile_cache is off"),
        ("auto", lambda patch: patch.setattr(cache_module, "_process_used_it", True), "has used it already"),
        ("auto", lambda patch: patch.setenv("MS_COMPILER_CACHE_ENABLE", "1"), "was set in the environment"),
        ("auto", lambda patch: patch.setattr(sys, "argv", ["-c"]), "needs a start script that is a file, got '-c'"),
    ],
)
def test_cache_is_off_where_it_cannot_be_safe(new_process, monkeypatch, setting, prepare, reason):
    prepare(monkeypatch)
    with compile_cache(setting, "a") as cache:
        assert os.environ["MS_COMPILER_CACHE_ENABLE"] == "0"
    assert (cache.state, cache.folder) == ("off", None)
    assert reason in cache.reason


def test_folder_that_cannot_be_written_is_a_fault_of_the_recipe(new_process, tmp_path):
    (tmp_path / "file").touch()
    match = r"graph.compile_cache: must be a folder that can be written, got .*file .*; name another folder or set off"
    with pytest.raises(RecipeError, match=match), compile_cache(str(tmp_path / "file"), "a"):
        pass


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of the package, so that a test can change its source."""
    folder = tmp_path_factory.mktemp("package")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(ms_varlen.__file__).parent, folder / "ms_varlen", ignore=ignore)
    return folder


def start(package, script=RUN, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MS_COMPILER_CACHE")}
    command = [sys.executable, str(script), json.dumps(options)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PYTHONPATH": str(package), "GLOG_v": "2"},
    )


def run(package, **options):
    """One run's result, with the number of graphs that MindSpore loaded."""
    done = start(package, **options)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "loaded": (done.stdout + done.stderr).count(LOADED)}


def times(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*.mindir")}


@pytest.mark.graph
def test_second_process_loads_its_graphs_and_other_networks_do_not_touch_them(package, tmp_path):
    cache = str(tmp_path / "cache")
    cold = run(package, cache=cache)
    entry = times(tmp_path)
    other_script = shutil.copy(RUN, tmp_path / "other_start_script.py")
    warm = run(package, cache=cache, script=other_script)
    assert (cold["state"], cold["loaded"], warm["state"], warm["loaded"]) == ("cold", 0, "warm", 3)
    assert warm["losses"] == cold["losses"]
    assert warm["counts"] == cold["counts"] == {"train": 1, "apply": 1, "eval": 1}
    with ThreadPoolExecutor(2) as pool:
        others = pool.map(lambda change: run(package, cache=cache, **change), [{"layers": 1}, {"kind": "static"}])
    wider, uncached = run(package, cache=cache, hidden=32), run(package, cache="off", hidden=32)
    assert wider["losses"] == uncached["losses"]
    for other in (*others, wider):
        assert (other["state"], other["loaded"]) == ("cold", 0)
        assert other["losses"] != cold["losses"]
    assert len(list((tmp_path / "cache").iterdir())) == 4
    assert entry.items() < times(tmp_path).items()


@pytest.mark.graph
def test_kill_while_compiling_and_two_runs_at_once_leave_one_whole_entry(package, tmp_path):
    cache = str(tmp_path / "cache")
    killed = start(package, cache=cache, die_after="apply")
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.partition(".tmp-")[1] for path in (tmp_path / "cache").iterdir()] == [".tmp-"]
    with ThreadPoolExecutor(2) as pool:
        pair = list(pool.map(lambda _: run(package, cache=cache), range(2)))
    after = run(package, cache=cache)
    assert [result["state"] for result in (*pair, after)].count("cold") >= 1
    assert (after["state"], after["loaded"]) == ("warm", 3)
    assert pair[0]["losses"] == pair[1]["losses"] == after["losses"]
    assert len([path for path in (tmp_path / "cache").iterdir() if ".tmp-" not in path.name]) == 1
    with (package / "ms_varlen" / "graph" / "shapes.py").open("a") as source:
        source.write("# edited\n")
    assert run(package, cache=cache)["state"] == "cold"
