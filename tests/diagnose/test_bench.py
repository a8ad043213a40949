"""The bench: its arithmetic, its turns with made-up contenders, our contenders in PyNative, its page, one real run."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.batches.samples import ArraySamples
from ms_varlen.diagnose.bench import ranks as bench_ranks
from ms_varlen.diagnose.bench import results
from ms_varlen.diagnose.bench.arena import EQUAL_REPEATS, BenchSettings
from ms_varlen.diagnose.bench.bench import CALIBRATION_FILE, bench
from ms_varlen.diagnose.bench.contenders import (
    EQUAL,
    OURS,
    RATE,
    Contender,
    bench_workload,
    contender_workload,
    in_buckets,
    in_packs,
    in_rows,
    middle_step,
    num_targets,
    samples_of,
    step_parts,
)
from ms_varlen.diagnose.bench.process import Worker, WorkerError, peak_rss_mb
from ms_varlen.diagnose.pages.bench_page import bench_tables, write_bench_report
from ms_varlen.errors import RecipeError
from ms_varlen.planning.cost import CostModel
from ms_varlen.recipe.recipe import parse_recipe
from ms_varlen.train.schedule import learning_rate
from tests.support.tiny_recipe import tiny_recipe

LOSS_TOLERANCE = 1e-5
"""fp32, two layouts of the same samples, two steps of a tiny model."""


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return tiny_recipe(
        folder,
        data={"source": "lognormal(median=12, p99=60, samples=60, seed=1)", "overlong": "truncate"},
        batch={"token_budget": 256, "max_segments": 6},
        train={"eval_every": 2},
    )


@pytest.fixture(scope="module")
def recipe(values):
    return parse_recipe(values)


@pytest.fixture(scope="module")
def workload(recipe):
    return bench_workload(recipe)


def seconds(*taken):
    return {step: {"seconds": value} for step, value in enumerate(taken)}


def test_speedup_compares_the_same_samples():
    assert results.speedup(seconds(1.0, 2.0, 4.0), seconds(3.0, 4.0, 20.0)) == {"median": 3.0, "q1": 2.5, "q3": 4.0}
    few = {1: {"seconds": 1.0}}
    assert results.speedup(few, seconds(3.0, 4.0, 20.0))["median"] == 4.0, "only the steps that both ran"


def test_speeds_are_real_tokens_by_seconds_of_each_step():
    found = results.speeds(seconds(1.0, 2.0, 0.5), [100, 100, 100])
    assert found["step_seconds"] == {"median": 1.0, "q1": 0.75, "q3": 1.5}
    assert found["real_tokens_per_second"] == {"median": 100.0, "q1": 75.0, "q3": 150.0}


def test_flop_limit_is_padded_over_real_work():
    work = results.Work(CostModel(linear=10.0, quadratic=2.0), head_token=4.0)
    # Two rows of 4 for samples of 1 and 3: 8 * 10 + (16 + 16) * 2 = 144 against 4 * 10 + (1 + 9) * 2 = 60.
    step = {"seconds": 3.0, "tokens_computed": 8, "squared_tokens": 32, "tokens_with_logits": 2}
    limit = results.flop_limit({0: step}, [np.array([1, 3])], work)
    # Two of four real tokens have a loss, and only those get logits, in rows as without padding.
    computable = (144 - 6 * 4) / (60 - 2 * 4)
    assert limit == {
        "limit": 2.4,
        "computable_limit": computable,
        "by_step": {0: 2.4},
        "computable_by_step": {0: computable},
    }
    assert results.share_of_limit(seconds(1.5), {0: step}, limit["by_step"]) == pytest.approx(2.0 / 2.4)
    assert results.share_of_limit({}, {0: step}, limit["by_step"]) is None
    assert results.rate_share(seconds(0.5), [60.0], 240.0) == 0.5
    all_logits = {0: {**step, "tokens_with_logits": 8}}
    assert results.flop_limit(all_logits, [np.array([1, 3])], work)["computable_limit"] == 2.4


def test_groups_are_compared_by_the_contender_that_both_ran():
    # Beside it the reference took twice the time that it took in the first group, so half of its seconds count.
    found = results.as_beside(seconds(8.0, 9.0), seconds(2.0, 3.0, 4.0), seconds(1.0, 1.0))
    assert found == {0: {"seconds": 4.0}, 1: {"seconds": 3.0}}


@given(
    st.tuples(*[st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8), st.floats(1e-3, 1.0)]),
    st.lists(st.integers(2, 2000), min_size=6, max_size=12, unique=True),
)
def test_calibration_finds_the_terms_that_made_the_seconds(terms, tokens):
    rng = np.random.default_rng(0)
    steps = {}
    for step, count in enumerate(tokens):
        squared = int(count * rng.integers(10, 500))
        taken = terms[0] * count + terms[1] * squared + terms[2]
        steps[step] = {"seconds": taken, "tokens_computed": count, "squared_tokens": squared}
    found = results.calibration(steps)
    assert found["steps"] == len(tokens)
    assert found["relative_error"] < 1e-3
    assert all(value >= 0 for value in found.values())


def test_calibration_gives_no_negative_term():
    steps = {
        step: {"seconds": taken, "tokens_computed": count, "squared_tokens": count**2}
        for step, (count, taken) in enumerate([(100, 1.0), (200, 2.1), (300, 2.9), (400, 4.0)])
    }
    found = results.calibration(steps)
    assert found["seconds_per_token"] == pytest.approx(0.01, rel=0.05)
    assert min(found["seconds_per_squared_token"], found["seconds_per_step"]) >= 0


def test_best_peer_is_the_fastest_on_the_same_samples():
    steps = {"varlen": seconds(1.0, 1.0), "a": seconds(3.0, 3.0), "b": seconds(2.0, 5.0), "c": seconds(9.0), "d": {}}
    assert results.best_of(["a", "b", "c", "d"], steps, "varlen") == "a"
    assert results.best_of(["d"], steps, "varlen") is None


def test_rows_are_dealt_so_that_few_are_empty():
    steps = [[np.arange(5), np.arange(5, 10)], [np.arange(10, 15)]]
    dealt = in_rows(steps)
    assert [[ids.size for ids in step] for step in dealt] == [[6, 4], [5]], "18 rows; rows of 5 would be too short"
    for before, after in zip(steps, dealt, strict=True):
        np.testing.assert_array_equal(np.concatenate(before), np.concatenate(after))
    assert [[ids.size for ids in step] for step in in_rows([[np.arange(40)]])] == [[10, 10, 10, 10]]


def test_packs_and_buckets_hold_every_sample_once():
    lengths, ids = np.array([0, 0, 30, 64, 10, 33, 20]), np.array([2, 3, 4, 5, 6])
    packs = in_packs(ids, lengths, 64)
    assert sorted(map(sorted, (pack.tolist() for pack in packs))) == [[2, 5], [3], [4, 6]]
    buckets = in_buckets(ids, lengths, np.array([16, 32, 64]))
    assert [bucket.tolist() for bucket in buckets] == [[4], [2, 6], [3, 5]]


def test_middle_step_is_the_median_and_its_static_graph_has_its_very_size(workload):
    parts = step_parts(workload, 3)
    lengths = np.asarray(workload.store.train.lengths)
    tokens = [int(lengths[step[0]].sum()) for step in parts]
    middle = middle_step(workload, parts)
    assert tokens[middle] == sorted(tokens)[1]
    ranged, static = (contender_workload(name, workload, parts)[0] for name in ("varlen_range", EQUAL))
    assert static.shapes.kind == "static"
    assert static.shapes.max == ranged.layout.place(lengths[parts[middle][0]]).tokens


def test_every_contender_lays_out_the_same_samples(workload):
    parts = step_parts(workload, 3)
    ids = [np.concatenate(step).tolist() for step in parts]
    for name in OURS:
        laid_out, own_parts = contender_workload(name, workload, parts)
        found = [np.concatenate(step).tolist() for step in own_parts]
        if name.startswith(("packed", "bucketed")):  # these choose their own order within a step
            assert list(map(sorted, found)) == list(map(sorted, ids))
        else:
            assert found == ids
        for step in own_parts:
            for micro_batch in step:
                lens = laid_out.layout.place(np.asarray(workload.store.train.lengths)[micro_batch])
                assert lens.tokens <= laid_out.shapes.max
                assert lens.segment_lens.size <= laid_out.shapes.max_segments
        made_up = laid_out.layout.made_up(laid_out.shapes.max)
        assert made_up.segment_lens.size <= laid_out.shapes.max_segments
    static, _ = contender_workload("varlen_static", workload, parts)
    longest = max(int(np.asarray(workload.store.train.lengths)[step].sum()) for step in map(np.array, ids))
    assert static.shapes.max == -(-longest // 16) * 16
    padded, _ = contender_workload("padded", workload, parts)
    assert padded.shapes.max % 64 == 0
    assert padded.shapes.kind == "static"


def test_bench_refuses_what_it_does_not_know(values):
    with pytest.raises(RecipeError, match=r"--modes: must be among varlen_range, .*, got windowed"):
        BenchSettings(["windowed"], [], 1, 1)
    with pytest.raises(RecipeError, match=r"--peers: must be among torch, mindformers, got jax"):
        BenchSettings(["varlen_range"], ["jax"], 1, 1)
    with pytest.raises(RecipeError, match=r"--modes: must hold varlen_range"):
        BenchSettings(["padded"], [], 1, 1)
    padded = {**values, "mode": "padded", "batch": {"rows": 4}, "model": {**values["model"]}}
    padded["model"]["variable_seq_lengths"] = False
    with pytest.raises(RecipeError, match=r"mode: must be varlen for a bench, .* got padded"):
        bench_workload(parse_recipe(padded))


def test_groups_share_nothing_but_the_main_contender(monkeypatch):
    monkeypatch.setattr(Contender, "missing", property(lambda contender: "torch" in contender.needs))
    settings = BenchSettings(["varlen_range", "padded"], ["torch", "mindformers"], steps=5, warmup=2)
    assert settings.groups() == {
        "ours": ["varlen_range", "padded"],
        "mindformers_batch": ["varlen_range", "mindformers_batch"],
        "mindformers_padded": ["varlen_range", "mindformers_padded"],
    }
    assert [settings.rounds(group) for group in settings.groups()] == [7, 7, 5]
    assert settings.all_rounds == 19
    assert BenchSettings(["varlen_range", "varlen_recompile"], [], steps=5, warmup=1).rounds("ours") == 6


def test_help_names_every_mode_and_gives_an_example(monkeypatch):
    from typer.testing import CliRunner

    from ms_varlen.cli.app import app

    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(re.search(rf"\b{name}\b", shown) for name in [*OURS, "torch", "mindformers"])
    assert "Example: ms-varlen bench recipes/bench_cpu.yaml" in shown


class FakeWorker:
    """Answers as a contender would; a step takes as many seconds as `SECONDS` says."""

    SECONDS = {"varlen_range": 1.0, "padded": 4.0, "padded_batch": 3.0, "varlen_recompile": 9.0}  # noqa: RUF012

    def __init__(self, contender, settings, log, calls):
        self.name, self.calls, self.warm = settings["name"], calls, "-warm" in log.name
        self.again = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.calls.append((self.name, "close"))

    def ask(self, command, **asked):
        self.calls.append((self.name, command, asked.get("index")))
        if self.name == "bucketed" and command == "step" and asked["index"] == 1:
            raise WorkerError("it ended with status -9")
        if self.name == RATE:
            return {"numpy": 100.0, "mindspore": 120.0}
        if command == "step" and self.warm:
            self.again += 1.0
        return {
            "ready": {
                "compile_seconds": 0.5 if self.warm else 6.0,
                "start_seconds": 0.75 if self.warm else 7.0,
                "compile_cache": "off" if self.name == "varlen_recompile" else "warm" if self.warm else "cold",
                "versions": {"attention": "kernel"},
            },
            "step": {
                "seconds": self.SECONDS.get(self.name, 2.0) * (asked.get("index", 0) + 1) - 0.25 * (self.again == 2.0),
                "loss": 2.0,
                "tokens_computed": 384 if self.name == "padded" else 128,
                "tokens_with_logits": 90,
                "squared_tokens": 6 * 64**2,
                "compiled": 0,
            },
            "finish": {"graphs": {"train": 1, "apply": 1}, "peak_rss_mb": 800.0},
            "middle_step": {"seconds": 1.5 if self.name == EQUAL else 1.0, "tokens": 128},
            "stream": {"data_wait_share": 0.001},
            "pipeline": {"tokens": 1000, "tokens_per_second": 8e6, "store_mb": 1.0},
            "save_weights": {},
        }[command]


@pytest.fixture
def fake_bench(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Contender, "missing", property(lambda contender: bool(contender.needs)))
    changed = recipe.checkpoint.model_copy(update={"output_dir": tmp_path / "output"})
    calls = []

    def ranks(settings, ranks, folder):
        calls.append(("ranks", ranks, settings["recipe"]["graph"]["compile_cache"]))
        reply = {"compile_seconds": 3.0, "start_seconds": 4.0, "compile_cache": "warm"}
        return {"ranks": ranks, "cold": [reply] * ranks, "warm": [reply] * ranks, "entries": 1, "same_losses": True}

    def run(modes, peers=(), steps=4, warmup=1, ranks_too=1):
        result = bench(
            recipe.model_copy(update={"checkpoint": changed}),
            BenchSettings(list(modes), list(peers), steps, warmup, ranks_too),
            lambda: calls.append(("round", "", None)),
            start=lambda contender, settings, log: FakeWorker(contender, settings, log, calls),
            start_ranks=ranks,
        )
        return result, calls

    return run


def test_contenders_take_turns_in_an_order_that_rotates(fake_bench):
    result, calls = fake_bench(["varlen_range", "padded", "varlen_recompile"])
    steps = [name for name, command, *_ in calls if command == "step"]
    assert steps[:4] == ["varlen_range", "padded", "varlen_recompile", RATE]
    assert steps[4:8] == ["padded", "varlen_recompile", RATE, "varlen_range"]
    assert steps[16:19] == ["varlen_range", "padded", RATE], (
        "the fifth round: recompiling has had its three timed steps"
    )
    assert result["contenders"]["varlen_recompile"]["timed_steps"] == 3
    assert result["contenders"]["padded"]["timed_steps"] == 4


def test_result_holds_medians_limits_and_both_starts(fake_bench, tmp_path):
    result, _ = fake_bench(["varlen_range", "padded"])
    row = result["contenders"]["varlen_range"]
    assert row["step_seconds"] == {"median": 3.5, "q1": 2.75, "q3": 4.25}, "the warm-up step of 1 s is not timed"
    assert row["speedup_over"] == {"padded": {"median": 4.0, "q1": 4.0, "q3": 4.0}}
    # The first step takes 1 s, the same again 0.75 s.
    assert (row["cold"]["to_first_step_seconds"], row["cold"]["first_step_done_seconds"]) == (7.25, 8.0)
    assert (row["warm"]["to_first_step_seconds"], row["warm"]["first_step_done_seconds"]) == (1.0, 1.75)
    assert (row["graphs"], row["peak_rss_mb"]) == ({"train": 1, "apply": 1}, 800.0)
    assert result["matrix_product_flops_per_second"] == {"numpy": 100.0, "mindspore": 120.0}
    assert result["pipeline"]["tokens_per_second"] == 8e6
    assert result["warning"].startswith("this recipe has not passed align: there is no")
    saved = json.loads((tmp_path / "output" / CALIBRATION_FILE).read_text())
    assert saved == result["calibration"]
    assert saved["seconds_per_compile"] == 3.0
    assert (saved["parameters"], saved["body"]) == (result["parameters"], "kernel")
    assert not list((tmp_path / "output" / "bench").glob("compile_cache-*"))


def test_range_and_static_are_compared_at_equal_tokens(fake_bench):
    result, calls = fake_bench(["varlen_range", "varlen_static"], steps=1, warmup=1)
    third = {"median": 2 / 3, "q1": 2 / 3, "q3": 2 / 3}
    assert result["range_over_static_at_equal_tokens"] == {**third, "tokens": 128, "repeats": EQUAL_REPEATS}
    names = [name for name, command, *_ in calls if command == "middle_step"]
    assert names[:4] == [EQUAL, "varlen_range", "varlen_range", EQUAL]
    result, _ = fake_bench(["varlen_range", "packed"])
    assert result["range_over_static_at_equal_tokens"] is None


def test_peers_take_turns_in_a_later_group_next_to_the_main_contender(fake_bench, monkeypatch):
    monkeypatch.setattr(Contender, "missing", property(lambda contender: "torch" in contender.needs))
    result, calls = fake_bench(["varlen_range", "padded"], ["mindformers"], steps=4)
    names = [name for name, command, *_ in calls if command == "step" and name != RATE]
    assert set(names[:10]) == {"varlen_range", "padded"}
    assert set(names[10:20]) == {"varlen_range", "mindformers_batch"}
    assert set(names[20:28]) == {"varlen_range", "mindformers_padded"}
    closed = calls.index(("padded", "close"))
    assert closed < calls.index(("mindformers_batch", "ready", None))
    assert calls.count(("round", "", None)) == 5 + 5 + 4
    row = result["contenders"]["mindformers_padded"]
    assert (row["group"], row["timed_steps"]) == ("mindformers_padded", 3)
    assert row["speedup_over"]["padded"]["median"] == 2.0
    assert result["groups"]["mindformers_batch"] == ["varlen_range", "mindformers_batch"]


def test_start_of_ranks_is_measured_where_asked_for(fake_bench):
    result, calls = fake_bench(["varlen_range", "padded"])
    assert result["ranks"] is None
    result, calls = fake_bench(["varlen_range", "padded"], ranks_too=2)
    ((_, count, cache),) = [call for call in calls if call[0] == "ranks"]
    assert (count, cache.rpartition("/")[2]) == (2, "ranks")
    (single,) = [table for table in bench_tables(result) if table.title == "Single measurements"]
    assert ["start of 2 ranks, cold and warm cache", RANKS_TEXT] in single.rows


RANKS_TEXT = (
    "compile s 3.00, 3.00 and 3.00, 3.00; until the first step begins 4.00, 4.00 and 4.00, 4.00; "
    "one entry serves every rank, losses bit-equal"
)


def test_contender_that_fails_is_out_and_the_others_continue(fake_bench):
    result, calls = fake_bench(["varlen_range", "bucketed", "padded"])
    row, label = result["contenders"]["bucketed"], OURS["bucketed"].label
    assert row == {"label": label, "ours": True, "group": "ours", "error": "it ended with status -9"}
    assert result["contenders"]["padded"]["timed_steps"] == 4
    assert ("bucketed", "finish", None) not in calls
    (table,) = [table for table in bench_tables(result) if table.title == "Did not run"]
    assert table.rows == [[label, "it ended with status -9"]]


def test_missing_peer_is_named_with_its_command(fake_bench):
    result, _ = fake_bench(["varlen_range", "padded"], ["torch", "mindformers"])
    missing = {name: row["missing"] for name, row in result["contenders"].items() if "missing" in row}
    assert missing["torch_packed"] == "pip install torch==2.13.0 transformers==4.57.1"
    assert missing["mindformers_padded"] == "pip install mindformers==1.9.0"
    assert result["peers"] == {"torch": None, "mindformers": None}


def test_page_and_tables_show_the_same_numbers(fake_bench, tmp_path):
    result, _ = fake_bench(["varlen_range", "bucketed", "padded", "padded_batch"], ["torch"])
    page = write_bench_report(result, tmp_path / "pages" / "bench.html").read_text()
    assert "<script" not in page
    assert set(re.findall(r'(?:src|href)="(\w+):', page)) == {"data"}
    for table in bench_tables(result):
        assert all(len(row) == len(table.head) for row in table.rows)
        for row in table.rows:
            assert row[0] in page
    speed, padding, cost, _, absent = bench_tables(result)
    limit = result["flop_limit"]["padded"]
    assert limit["computable_limit"] < limit["limit"]
    assert f"FLOP limit {limit['limit']:.2f}, computable limit {limit['computable_limit']:.2f}" in padding.notes[0]
    assert padding.notes[-1] in page
    shares = ["of limit", "of computable"]
    assert padding.head == ["contender", "x max", *shares, "x batch", *shares]
    assert speed.rows[0][:2] == [OURS["varlen_range"].label, f"{result_speed(result):,.0f}"]
    assert [row[0] for row in cost.rows] == [OURS[name].label for name in ("varlen_range", "padded", "padded_batch")]
    assert [row[0] for row in bench_tables(result, short=True)[2].rows] == ["varlen_range", "padded", "padded_batch"]
    assert absent.rows[1][1] == "not installed: pip install torch==2.13.0 transformers==4.57.1"


def result_speed(result):
    return result["contenders"]["varlen_range"]["real_tokens_per_second"]["median"]


def test_worker_answers_logs_and_says_why_it_failed(tmp_path, monkeypatch):
    (tmp_path / "echo_contender.py").write_text(
        "import os\n"
        "print('hello from the import')\n"
        "def start(settings):\n"
        "    def fail(): raise ValueError('no such step\\nsecond line')\n"
        "    return {'echo': lambda x: {'x': x, 'name': settings['name']}, 'fail': fail, 'die': lambda: os._exit(3)}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Worker("echo_contender", {"name": "me"}, tmp_path / "logs" / "echo.log") as worker:
        assert worker.ask("echo", x=2) == {"x": 2, "name": "me"}
        with pytest.raises(WorkerError, match=r"^ValueError: no such step$"):
            worker.ask("fail")
        assert worker.ask("echo", x=3)["x"] == 3
        with pytest.raises(WorkerError, match=r"ended with status 3 at 'die', see .*echo.log"):
            worker.ask("die")
    assert "hello from the import" in (tmp_path / "logs" / "echo.log").read_text()
    with (
        Worker("no_such_contender", {}, tmp_path / "none.log") as worker,
        pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'no_such_contender'"),
    ):
        worker.ask("ready")


def test_peak_memory_is_that_of_this_process():
    assert peak_rss_mb() > 20


@pytest.fixture(scope="module")
def contenders(recipe):
    from ms_varlen.diagnose.bench.worker import OwnContender

    settings = {"recipe": recipe.resolved(), "steps": 3}
    return {name: OwnContender({**settings, "name": name}) for name in OURS}


def test_our_contenders_train_alike(contenders, recipe, workload):
    real = [sum(int(workload.store.train.lengths[i]) for ids in step for i in ids) for step in step_parts(workload, 3)]
    for index in range(2):
        rate = learning_rate(recipe.train, index + 1)
        replies = {name: contender.step(index, rate) for name, contender in contenders.items()}
        losses = [reply["loss"] for reply in replies.values()]
        assert max(losses) - min(losses) < LOSS_TOLERANCE
        assert replies["varlen_range"]["tokens_computed"] == -(-real[index] // 16) * 16
        assert replies["packed"]["tokens_computed"] == replies["packed_dense"]["tokens_computed"]
        assert replies["packed_dense"]["squared_tokens"] == 64 * 2 * replies["packed_dense"]["tokens_computed"]
        assert replies["bucketed"]["squared_tokens"] < replies["padded_batch"]["squared_tokens"]
        assert replies["varlen_range"]["squared_tokens"] < replies["padded"]["squared_tokens"]
        assert len({reply["tokens_with_logits"] for reply in replies.values()}) == 1
    assert replies["padded"]["tokens_computed"] % 64 == 0


def test_our_contender_tells_of_data_and_weights(contenders, tmp_path):
    contender = contenders["varlen_range"]
    assert contender.ready()["compile_cache"] == "off", "PyNative mode compiles nothing"
    assert 0 <= contender.stream(3)["data_wait_share"] < 1
    assert 0 <= contenders["packed_dense"].stream(3)["data_wait_share"] < 1
    assert contender.middle_step()["tokens"] % 16 == 0
    pipeline = contender.pipeline()
    assert pipeline["tokens"] > 500
    assert pipeline["store_mb"] > 0
    contender.save_weights(str(tmp_path / "weights.safetensors"))
    assert (tmp_path / "weights.safetensors").stat().st_size > 1000
    assert contender.finish()["graphs"] == {"train": 0, "apply": 0}


def test_matrix_product_gives_both_rates():
    from ms_varlen.diagnose.bench.worker import start

    reply = start({"name": RATE})["step"]()
    assert min(reply["numpy"], reply["mindspore"]) > 1e8


SAMPLES = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]


@pytest.mark.parametrize(
    ("masks", "labels", "targets"),
    [(None, [[-100, 6, 7], [-100, 9]], 3), ([[True, False, True], [False, True]], [[-100, -100, 7], [-100, 9]], 2)],
)
def test_peers_learn_what_the_samples_say_and_no_more(masks, labels, targets):
    found = samples_of(ArraySamples(SAMPLES, masks), np.array([1, 0]))
    assert [tokens.tolist() for tokens, _ in found] == [[8, 9], [5, 6, 7]]
    assert [row.tolist() for _, row in found] == labels[::-1]
    assert num_targets(found) == targets


def test_torch_inputs_hold_the_same_samples():
    pytest.importorskip("torch", reason="PyTorch is an optional peer")
    from ms_varlen.diagnose.bench.torch_peer import packed_inputs, padded_inputs, segments_inputs

    samples = samples_of(ArraySamples(SAMPLES), np.arange(2))
    (padded,) = padded_inputs(samples, 0)
    assert padded["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert padded["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100]]
    (segments,) = segments_inputs(samples, 0)
    assert segments["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert segments["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    (packed,) = packed_inputs(samples, 0)
    assert packed["attention_mask"][0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.graph
def test_bench_command_runs_contenders_in_processes(values, tmp_path):
    changed = {**values, "graph": {"compile_cache": "off"}, "checkpoint": {"output_dir": str(tmp_path / "output")}}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(changed))
    command = [sys.executable, "-m", "ms_varlen.cli.app", "bench", str(path), "--modes", "varlen_range,padded"]
    options = ["--steps", "2", "--warmup", "1", "--ranks", "1", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    varlen, padded = result["contenders"]["varlen_range"], result["contenders"]["padded"]
    assert [row[start]["compile_cache"] for row in (varlen, padded) for start in ("cold", "warm")] == 2 * [
        "cold",
        "warm",
    ]
    assert varlen["graphs"] == {"train": 1, "apply": 1}
    assert padded["loss_max_abs_diff"] < LOSS_TOLERANCE
    assert result["pipeline"]["tokens"] > 500
    page = (tmp_path / "output" / "bench.html").read_text()
    assert OURS["padded"].label in page


@pytest.mark.graph
@pytest.mark.ranks
def test_ranks_load_the_entry_that_one_of_them_made_and_compute_the_same(values, tmp_path):
    cache = tmp_path / "cache"
    recipe = parse_recipe({**values, "graph": {"compile_cache": str(cache)}})
    settings = {"recipe": recipe.resolved(), "steps": 2}
    found = bench_ranks.measure_ranks(settings, 2, tmp_path / "ranks")
    assert [reply["compile_cache"] for reply in found["warm"]] == ["warm", "warm"]
    assert "cold" in [reply["compile_cache"] for reply in found["cold"]]
    assert (found["entries"], found["same_losses"]) == (1, True)
    first, second = (reply["losses"] for reply in found["cold"])
    assert len({*first, *second}) == 4, "each rank has samples of its own"
    assert [path.name for path in cache.glob("*/rank_*")] == ["rank_0"]
