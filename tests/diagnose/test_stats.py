import json
import os
import re
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest

from ms_varlen import DataError, RecipeError
from ms_varlen.data.config import DataConfig
from ms_varlen.data.store.store import prepare_store
from ms_varlen.diagnose.advise.stats import corpus_stats, cpu_body, document_lengths, read_calibration, stats_recipe
from ms_varlen.recipe.recipe import load_recipe
from ms_varlen.workload.workload import prepare
from tests.support.page import Page
from tests.support.tiny_recipe import write_corpus

LENGTHS = [5, 40, 7, 64, 65, 130, 20, 300, 12, 9]  # tokens of documents, end-of-text included

# The program in a process of its own, which must not load MindSpore.
WITHOUT_MINDSPORE = """
import sys
from ms_varlen.cli import app as cli
status = cli.main(sys.argv[1:])
sys.exit("MindSpore was imported" if "mindspore" in sys.modules else status)
"""

RECIPE = """
mode: padded
data: {{source: {folder}/corpus.jsonl, tokenizer: bytes, eval_fraction: 0.1, store_dir: {folder}/stores}}
batch: {{rows: 4, pad_to: max}}
shapes: {{kind: static, divisor: 16}}
model:
  config: {{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}}
  variable_seq_lengths: false
  seq_length: 128
  max_position_embeddings: 128
train: {{steps: 10, learning_rate: 1e-3}}
checkpoint: {{output_dir: {folder}/output}}
"""


def texts_of(lengths):
    return ["".join(chr(97 + (number + place) % 26) for place in range(n - 1)) for number, n in enumerate(lengths)]


def written_corpus(folder, lengths):
    write_corpus(folder, texts_of(lengths))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(3, 1, 300)), 2, 400).astype(int).tolist()
    folder = written_corpus(tmp_path_factory.mktemp("stats"), lengths)
    (folder / "padded.yaml").write_text(RECIPE.format(folder=folder))
    return folder


def ms_varlen(folder, *arguments):
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "100"}
    command = [sys.executable, "-c", WITHOUT_MINDSPORE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


def result_of(folder, *arguments):
    done = ms_varlen(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("eval_fraction", [0.0, 0.4])
@pytest.mark.parametrize("overlong", ["split", "truncate", "drop"])
def test_documents_count_with_their_lengths_before_cutting(tmp_path, overlong, eval_fraction):
    data = DataConfig(
        source=str(written_corpus(tmp_path, LENGTHS) / "corpus.jsonl"),
        tokenizer="bytes",
        overlong=overlong,
        eval_fraction=eval_fraction,
        store_dir=str(tmp_path / "stores"),
    )
    assert sorted(document_lengths(prepare_store(data, 64)).tolist()) == sorted(LENGTHS)


def test_a_source_gets_a_default_decoder():
    recipe = stats_recipe("pydoc", None, 1000, ["train.seed=3"])
    assert (recipe.model.seq_length, recipe.shapes.divisor, recipe.batch.token_budget) == (1000, 8, 4096)
    assert (recipe.data.source, recipe.data.tokenizer, recipe.data.eval_fraction) == ("pydoc", "bytes", 0.0)
    assert recipe.train.seed == 3


def test_options_of_a_source_are_refused_with_a_recipe():
    with pytest.raises(
        RecipeError, match=r"--seq-length: must be left out with a recipe, got 64; set model.seq_length"
    ):
        stats_recipe("recipes/quickstart.yaml", None, 64, [])


def test_calibration_is_read_where_a_bench_left_it(tmp_path):
    assert read_calibration(tmp_path) is None
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(DataError, match=r"a calibration must be JSON, got .*calibration.json; bench again"):
        read_calibration(tmp_path)
    (tmp_path / "calibration.json").write_text("[]")
    with pytest.raises(DataError, match=r"must be a JSON object, got list"):
        read_calibration(tmp_path)


def test_stats_of_a_source_as_json(corpus):
    source = corpus / "corpus.jsonl"
    result = result_of(corpus, "stats", source, "--seq-length", "128")
    lengths = np.array([len(json.loads(line)["text"]) + 1 for line in source.read_text().splitlines()])
    documents = result["documents"]
    assert (documents["documents"], documents["max"]) == (300, lengths.max())
    cleaning = result["cleaning"]
    assert documents["tokens"] == cleaning["tokens_in"] == lengths.sum()
    percentiles = np.percentile(lengths, [50, 90, 99])
    np.testing.assert_allclose([documents[key] for key in ("p50", "p90", "p99")], percentiles)
    assert result["samples"]["max"] == 128
    assert list(result["shares"]) == ["padded_to_maximum", "padded_to_batch_maximum", "bucketed", "packed", "varlen"]
    for share in result["shares"].values():
        assert 0 < share["tokens"] <= 1
        assert 0 < share["flops"] <= 1
    assert result["cut_at_p99"]["limit"] == -(-np.percentile(lengths, 99) // 64) * 64
    assert result["cut_at_p99"]["tokens_cut"] == np.maximum(lengths - result["cut_at_p99"]["limit"], 0).sum()
    assert result["flops_of"].startswith("a default decoder: 4 layers, hidden size 256")
    assert sum(result["histogram"]["counts"]) == 300
    assert result["cumulative"]["documents"][-1] == result["cumulative"]["tokens"][-1] == 1.0
    assert result["decided_by"] == "model FLOPs"
    assert not any(advice["differs"] for advice in result["advice"])
    assert len(result["modes"]) == 12


def test_stats_of_a_recipe_are_about_its_model_and_its_plan(corpus):
    result = result_of(corpus, "stats", corpus / "padded.yaml")
    assert result["flops_of"] == "the recipe: 1 layers, hidden size 32, vocabulary 258"
    plan = result_of(corpus, "plan", corpus / "padded.yaml")
    own = next(row for row in result["modes"] if row["is_recipe"])
    assert (own["mode"], own["kind"]) == ("padded", "static")
    assert own["real_token_share"] == pytest.approx(1 - plan["pad_ratio"])
    assert own["steps_per_epoch"] == plan["steps_per_epoch"]


def test_advised_overrides_of_a_plan_make_a_recipe_that_is_as_advised(corpus):
    plan = result_of(corpus, "plan", corpus / "padded.yaml")
    assert {advice["key"] for advice in plan["advice"] if advice["differs"]} >= {"mode", "batch.token_budget"}
    advised = load_recipe(corpus / "padded.yaml", plan["advised_overrides"])
    assert advised.mode in ("packed", "varlen")
    assert advised.model.variable_seq_lengths
    again = result_of(corpus, "plan", corpus / "padded.yaml", *plan["advised_overrides"])
    assert again["advised_overrides"] == []
    assert not any(advice["key"] == "mode" and advice["differs"] for advice in again["advice"])
    assert again["padding_overhead"] < plan["padding_overhead"] / 5


def test_a_plan_for_several_ranks_tells_their_balance(corpus):
    varlen = ["mode=varlen", "model.variable_seq_lengths=true", "batch.rows=null", "batch.pad_to=null"]
    plan = result_of(corpus, "plan", corpus / "padded.yaml", *varlen, "batch.token_budget=256", "--world-size", "4")
    assert plan["world_size"] == 4
    assert plan["imbalance_mean"] <= plan["imbalance_max"]
    assert plan["imbalance_mean"] < plan["imbalance_mean_unbalanced"]
    assert plan["imbalance_max"] <= plan["imbalance_max_unbalanced"]
    assert plan["batch_overhead"] == 0.0
    assert all(ledger["balanced"] for ledger in plan["ledger"].values())
    alone = result_of(corpus, "plan", corpus / "padded.yaml")
    assert (alone["world_size"], alone["imbalance_max"], alone["imbalance_max_unbalanced"]) == (1, 0.0, 0.0)
    assert alone["batch_overhead"] == pytest.approx(alone["padding_overhead"], rel=0.02)  # the last is not full
    assert alone["length_mixing"] == pytest.approx(1, abs=0.2)


def test_a_calibration_decides_and_is_named(corpus, tmp_path):
    calibration = {
        "format": 1,
        "machine": {"processor": "some CPU", "cores": 2, "system": "Linux"},
        "seconds_per_token": 1e-4,
        "seconds_per_squared_token": 1e-9,
        "seconds_per_step": 0.01,
        "seconds_per_compile": 5.0,
        "relative_error": 0.05,
        "steps": 12,
        "parameters": result_of(corpus, "plan", corpus / "padded.yaml")["parameters"],
        "body": cpu_body(),
    }
    (tmp_path / "calibration.json").write_text(json.dumps(calibration))
    plan = result_of(corpus, "plan", corpus / "padded.yaml", f"checkpoint.output_dir={tmp_path}")
    assert (plan["decided_by"], plan["calibration_note"]) == ("calibration.json", None)
    assert all(row["speedup_by_seconds"] > 0 for row in plan["modes"])
    advice = next(advice for advice in plan["advice"] if advice["key"] == "speed-up over padding")
    assert {"over_padded_to_maximum_by_flops", "over_padded_to_maximum_by_seconds"} <= advice["numbers"].keys()
    assert "decided by calibration.json (some CPU, 2 cores, Linux; fit within 5%)" in advice["why"]
    (tmp_path / "calibration.json").write_text(json.dumps(calibration | {"parameters": 7}))
    plan = result_of(corpus, "plan", corpus / "padded.yaml", f"checkpoint.output_dir={tmp_path}")
    assert plan["decided_by"] == "model FLOPs"
    assert plan["calibration_note"].startswith("calibration.json is not used: it was measured on a model of 7 param")
    assert plan["modes"][0]["speedup_by_seconds"] is None


def test_the_page_of_stats(corpus, tmp_path):
    path = tmp_path / "new" / "stats.html"
    done = ms_varlen(corpus, "stats", corpus / "padded.yaml", "--report", path)
    assert done.returncode == 0, done.stderr
    html = path.read_text()
    page = Page(html)
    assert [reference[:26] for reference in page.references] == ["data:image/svg+xml;base64,"] * 4
    assert not re.search(r"https?:|url\(|@import", html)
    for words in ("Lengths of", "Modes compared", "Advice", "If documents were cut at P99", "Share of real work"):
        assert words in page.text
        assert words in done.stdout or words == "Lengths of"


def test_the_page_of_a_plan(corpus, tmp_path):
    path = tmp_path / "plan.html"
    done = ms_varlen(corpus, "plan", corpus / "padded.yaml", "--report", path, "--world-size", "2")
    assert done.returncode == 0, done.stderr
    page = Page(path.read_text())
    assert len(page.references) == 4
    assert "Plan of padded.yaml" in page.text
    assert re.search(r"to take it: ms-varlen train \S+padded.yaml mode=(packed|varlen) ", page.text)
    for words in ("Advice that differs from the recipe", "Windows", "Where the corpus goes in an epoch"):
        assert words in page.text
        assert words in done.stdout


def test_padded_to_the_maximum_is_to_the_longest_sample_without_rows_of_pads(tmp_path):
    written_corpus(tmp_path, [30, 50, 20])  # far fewer than a micro-batch's rows, far below seq_length 2048
    result = result_of(tmp_path, "stats", tmp_path / "corpus.jsonl")
    assert result["shares"]["padded_to_maximum"]["tokens"] == 100 / 150
    assert result["shares"]["padded_to_batch_maximum"] == result["shares"]["padded_to_maximum"]
    speedup = next(advice for advice in result["advice"] if advice["key"] == "speed-up over padding")
    assert 1 <= speedup["numbers"]["over_padded_to_maximum_by_flops"] < 1.6


def test_picked_buckets_are_the_advised_ones(corpus):
    overrides = [
        "mode=bucketed",
        "model.variable_seq_lengths=true",
        "batch.rows=null",
        "batch.pad_to=null",
        "batch.token_budget=512",
        "shapes.kind=buckets",
        "shapes.row_buckets=auto",
    ]
    plan = result_of(corpus, "plan", corpus / "padded.yaml", *overrides)
    advised = next(advice for advice in plan["advice"] if advice["key"] == "shapes.row_buckets")["advised"]
    sizes = plan["shapes"]["buckets"]
    assert sorted({512 // length * length for length in advised if length * (512 // length) in sizes}) == sizes
    assert plan["graphs"]["train"] == len(sizes) <= len(advised)
    assert not any(advice["key"] == "shapes.num_buckets" and advice["differs"] for advice in plan["advice"])


def test_one_document_has_stats(tmp_path):
    written_corpus(tmp_path, [50])
    result = result_of(tmp_path, "stats", tmp_path / "corpus.jsonl", "--report", tmp_path / "one.html")
    assert result["documents"]["p99"] == 50
    assert result["advice"]
    assert (tmp_path / "one.html").is_file()


def test_removed_documents_are_dropped_samples_in_the_ledger(tmp_path):
    folder = written_corpus(tmp_path, LENGTHS)  # a limit of 64 tokens drops three
    (folder / "padded.yaml").write_text(RECIPE.format(folder=folder))
    overrides = ["data.overlong=drop", "model.seq_length=64", "model.max_position_embeddings=64", "batch.rows=1"]
    overrides += ["data.eval_fraction=0.0"]
    workload = prepare(load_recipe(folder / "padded.yaml", overrides))
    samples, tokens = (workload.ledger(0, 2)[unit].to_dict() for unit in ("samples", "tokens"))
    zeros = {"skipped": 0, "left_over": 0, "held_out": 0, "cut": 0, "balanced": True}
    assert samples == {"total": 10, "trained": 2, "pending": 5, "dropped": 3, **zeros}
    assert (tokens["total"], tokens["dropped"], tokens["balanced"]) == (sum(LENGTHS), 65 + 130 + 300, True)


def test_a_vocabulary_that_is_too_small_is_reported_under_the_name_of_the_file(corpus):
    done = ms_varlen(corpus, "plan", corpus / "padded.yaml", "model.config.vocab_size=100")
    assert done.returncode == 1
    rule = "model.config.vocab_size must be >= the tokenizer's size (258), got 100"
    assert f"error: {corpus}/padded.yaml: 1 fault\n  {rule}" in done.stderr


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_a_limit_far_above_the_longest_document_costs_nothing(tmp_path, mode):
    folder, most = written_corpus(tmp_path, LENGTHS * 4), 100_000_000
    overrides = [f"data.store_dir={tmp_path}", f"mode={mode}"]
    if mode == "padded":
        overrides += ["batch.rows=4", "batch.token_budget=null", "batch.pad_to=batch", "batch.window=20"]
        overrides += ["model.variable_seq_lengths=false"]
    recipe = stats_recipe(str(folder / "corpus.jsonl"), None, most, overrides)
    begin = time.perf_counter()
    tracemalloc.start()
    result = corpus_stats(str(folder / "corpus.jsonl"), recipe)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (result.seq_length, result.samples["max"]) == (most, 300)
    assert peak < 100e6  # one array of a byte for each length would fill it
    assert time.perf_counter() - begin < 10


def test_a_source_that_is_none_is_an_error_of_one_line(tmp_path):
    done = ms_varlen(tmp_path, "stats", "nothing.jsonl")
    assert done.returncode == 1
    assert "data.source: must be an existing file or folder, got nothing.jsonl" in done.stderr
    assert "Traceback" not in done.stderr
