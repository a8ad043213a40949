import dataclasses
import json
import math
import re

import numpy as np
import pytest
import yaml

from ms_varlen import CheckpointError
from ms_varlen.diagnose.align.alignment import Alignment, Bisection, Rung, Verdict
from ms_varlen.diagnose.pages.figures import running_mean
from ms_varlen.diagnose.pages.run_page import write_align_report, write_report
from ms_varlen.modes import Mode
from ms_varlen.planning.ledger import EpochLedger
from ms_varlen.planning.statistics import length_histogram, length_statistics
from tests.support.page import Page


@pytest.fixture
def no_pictures(monkeypatch):
    """For tests that read text only: drawing takes most of a page's time."""
    monkeypatch.setattr("ms_varlen.diagnose.pages.run_page.svg_data", lambda figure: "data:,")


RECIPE = {"mode": "varlen", "data": {"source": "a <b> & c.jsonl"}, "train": {"steps": 200}}


def metrics_line(step, rng, **changes):
    real = int(rng.integers(3500, 4097))
    computed = -(-real // 64) * 64
    return {
        "step": step,
        "epoch": 0,
        "loss": 2.2 + 3.4 * float(np.exp(-step / 40)) + float(rng.normal(0, 0.06)),
        "lr": 1e-3,
        "grad_norm": 1.5,
        "tokens_real": real,
        "tokens_computed": computed,
        "tokens_supervised": real - 12,
        "segments": 12,
        "pad_ratio": 1 - real / computed,
        "step_ms": 30_000.0 if step == 1 else float(rng.normal(900, 40)),
        "data_ms": 4.0,
        "graphs_compiled": {"train": 1, "apply": 1, "eval": 1},
        "sample_ids_sha256": "00",
    } | changes


def skipped_line(step, rng, samples):
    return metrics_line(step, rng, loss=None, grad_norm=None, skipped=True, sample_ids=list(range(samples)))


def plan(lengths):
    return {
        "mode": "varlen",
        "shapes": {"kind": "range", "min": 64, "max": 4096, "divisor": 64, "max_segments": 256},
        "graphs": {"train": 1, "apply": 1, "eval": 1},
        "steps_per_epoch": 610,
        "epochs": 0.328,
        "micro_batches_per_step": 1,
        "samples": int(lengths.size),
        "eval_samples": 210,
        "tokens_real": 2_345_678,
        "tokens_computed": 2_365_440,
        "tokens_per_step": 3845.4,
        "pad_ratio": 0.00835,
        "padding_overhead": 0.00842,
        "sizes": 9,
        "max_segments_used": 41,
        "lengths": {**length_statistics(lengths), "histogram": length_histogram(lengths)},
        "parameters": 3_541_248,
        "ledger": {
            "tokens": EpochLedger(2_350_001, 2_300_000, 0, 0, 2_070, 47_000, 931, 0).to_dict(),
            "samples": EpochLedger(10_411, 10_201, 0, 0, 0, 210, 0, 0).to_dict(),
        },
        "store": "/home/me/.cache/ms_varlen/token_stores/0123",
        "data_fingerprint": "5f0a" * 8,
        "plan_fingerprint": "91bc" * 8,
    }


def some_lengths():
    return np.clip(np.random.default_rng(0).lognormal(4.9, 1.1, 10_411), 2, 2048).astype(np.int32)


def page_of(folder, metrics, run_plan=None, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics) + tail)
    (folder / "plan.json").write_text(json.dumps(run_plan or plan(some_lengths())))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    path = write_report(folder)
    assert path == folder / "report.html"
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "metrics.jsonl",
        "plan.json",
        "recipe.yaml",
        "report.html",
    ]
    return path.read_text()


def run_lines(steps=200, skipped=()):
    rng = np.random.default_rng(1)
    lines = [skipped_line(n, rng, 20) if n in skipped else metrics_line(n, rng) for n in range(1, steps + 1)]
    for line in lines[49::50]:
        line["eval_loss"] = line["loss"] + 0.03
    return lines


def test_a_page_is_one_file_that_refers_to_nothing_outside(tmp_path):
    html = page_of(tmp_path, run_lines())
    page = Page(html)
    assert [reference[:26] for reference in page.references] == ["data:image/svg+xml;base64,"] * 4
    assert not re.search(r"https?:|url\(|@import", html)


def test_equal_runs_give_equal_bytes(tmp_path):
    assert page_of(tmp_path, run_lines(6)) == page_of(tmp_path, run_lines(6))


def test_headline_numbers_match_the_metrics(tmp_path, no_pictures):
    lines = run_lines(8)
    for n, line in enumerate(lines):
        line |= {"tokens_real": 3000, "tokens_computed": 4000, "step_ms": 500.0 if n >= 4 else 9e9, "loss": 2.5}
    lines[5]["eval_loss"] = 2.25
    text = Page(page_of(tmp_path, lines)).text
    assert "varlen · 3.5 M parameters · 8 of 200 steps" in text
    assert "Final loss 2.5000 nats per token, step 8" in text
    assert "Final eval loss 2.2500 nats per token, step 6" in text
    assert "Real tokens per second 6,000 median" in text
    assert "Pad ratio 25.00% mean; planned 0.83%" in text
    assert "Graphs compiled 3 train 1, apply 1, eval 1 Skipped steps 0 of 8" in text


def test_skipped_steps_are_counted_and_listed(tmp_path, no_pictures):
    lines = run_lines(40, skipped=(7, 40))
    text = Page(page_of(tmp_path, lines)).text
    assert "Skipped steps 2 of 40" in text
    assert "nats per token, step 39" in text
    assert "applied steps 38 456" in text
    assert "skipped steps 2 24" in text
    assert "7 0 " + ", ".join(map(str, range(16))) + ", and 4 more" in text


def test_many_skipped_steps_are_not_all_listed(tmp_path, no_pictures):
    text = Page(page_of(tmp_path, run_lines(30, skipped=range(1, 26)))).text
    assert "The first 20 of 25; metrics.jsonl holds them all." in text


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_run_of_one_step_has_a_page(tmp_path, skipped):
    text = Page(page_of(tmp_path, run_lines(1, skipped))).text
    assert "varlen · 3.5 M parameters · 1 of 200 steps" in text
    assert "the median covers step 1 onwards" in text
    assert ("every step was skipped" in text) == bool(skipped)
    assert "Final eval loss – no evaluation ran" in text


def test_more_graphs_than_planned_stand_out(tmp_path, no_pictures):
    line = metrics_line(1, np.random.default_rng(0), graphs_compiled={"train": 3, "apply": 1, "eval": 0})
    html = page_of(tmp_path, [line])
    assert "Graphs compiled 4 train 3, apply 1, eval 0; more than planned: train" in Page(html).text
    assert html.count('class="number bad"') == 1


def test_ledger_and_plan_tables_show_every_count(tmp_path, no_pictures):
    run_plan = plan(some_lengths())
    text = Page(page_of(tmp_path, run_lines(2), run_plan)).text
    assert "everything the source gave 10,411 2,350,001 trained in an epoch 10,201 2,300,000" in text
    assert "held out for evaluation 210 47,000 cut off overlong documents 0 931" in text
    assert "shapes.max 4,096 largest size of a micro-batch, tokens" in text


def test_a_plan_without_a_histogram_leaves_that_picture_out(tmp_path, no_pictures):
    run_plan = plan(some_lengths())
    del run_plan["lengths"]["histogram"]
    assert len(Page(page_of(tmp_path, run_lines(2), run_plan)).references) == 3


def test_text_of_a_recipe_is_no_html(tmp_path, no_pictures):
    assert "a &lt;b&gt; &amp; c.jsonl" in page_of(tmp_path, run_lines(1))


def test_a_last_line_that_a_kill_cut_off_does_not_count(tmp_path, no_pictures):
    assert "Skipped steps 0 of 3" in Page(page_of(tmp_path, run_lines(3), tail='{"step": 4, "lo')).text


def test_a_broken_line_is_refused_by_number(tmp_path, no_pictures):
    with pytest.raises(CheckpointError, match=r"metrics.jsonl line 2 must be a JSON object, found 'x'; remove"):
        page_of(tmp_path, run_lines(1), tail="x\n")


def test_a_run_without_steps_is_refused(tmp_path, no_pictures):
    with pytest.raises(CheckpointError, match=r"metrics.jsonl must hold a step at least, found none"):
        page_of(tmp_path, [])


def test_another_folder_is_refused(tmp_path, no_pictures):
    with pytest.raises(CheckpointError, match=r"metrics.jsonl must be in a run folder, found none in"):
        write_report(tmp_path)


def align_result(difference, bisect=None, **changes):
    loss = 2.2 + 3.4 * np.exp(-np.arange(1, 101) / 25)
    verdict = Verdict(
        loss=(loss + difference).tolist(),
        loss_padded=loss.tolist(),
        gradient_rel_diff=[3.2e-6] * 100,
        max_abs_diff=float(np.max(difference)),
        tolerance=1e-3,
        gradient_max_rel_diff=3.2e-6,
        gradient_tolerance=1e-4,
        gradient_max_rel_diff_later=4.5e-5,
        gradient_tolerance_later=1e-3,
        gradient_worst_parameter="model.layers.3.self_attn.k_proj.weight",
        first_failed_step=None,
        passed=True,
    )
    verdict = dataclasses.replace(verdict, **changes)
    return Alignment(
        "recipes/align_cpu.yaml", Mode.VARLEN, 100, 0, verdict, Mode.PADDED, 0.0, bisect, ["0"] * 100, {}, 84.2
    )


def small_difference():
    return np.abs(np.random.default_rng(2).normal(0, 1, 100)) * 1e-6 * np.linspace(0.1, 4, 100)


def test_an_alignment_that_passed(tmp_path):
    html = write_align_report(align_result(small_difference()), tmp_path / "new" / "align.html").read_text()
    page = Page(html)
    assert [reference[:26] for reference in page.references] == ["data:image/svg+xml;base64,"] * 2
    assert "Alignment of varlen with padded PASSED recipes/align_cpu.yaml · 100 steps · 84.2 s" in page.text
    assert (
        "gradient (relative) 3.20e-06 1.00e-04 first step "
        "gradient (relative), later 4.50e-05 1.00e-03 "
        "later steps; nearest to its limit in model.layers.3.self_attn.k_proj.weight" in page.text
    )
    assert "every step within" in page.text
    assert "FAILED" not in page.text


def test_an_alignment_that_failed_names_the_step(tmp_path, no_pictures):
    difference = small_difference()
    difference[59:] += np.linspace(2e-3, 8e-2, 41)
    result = align_result(difference, passed=False, first_failed_step=60, gradient_max_rel_diff=None)
    text = Page(write_align_report(result, tmp_path / "align.html").read_text()).text
    assert "FAILED" in text
    assert "PASSED" not in text
    assert "step 60 is the first with a difference that is not allowed" in text
    assert "gradient (relative) – 1.00e-04" in text


def test_where_a_failed_alignment_begins_is_on_its_page(tmp_path, no_pictures):
    found = Bisection(
        rung="two samples",
        rungs=[Rung("one sample of a fixed length", None), Rung("two samples", "forward")],
        code="LEN-ORDER",
        text="two samples, layer 0, k: out of order",
    )
    result = align_result(small_difference(), found, passed=False, first_failed_step=2)
    text = Page(write_align_report(result, tmp_path / "align.html").read_text()).text
    where = "Where it begins LEN-ORDER two samples, layer 0, k: out of order"
    assert f"{where} {found.remedy} More: ms-varlen doctor --explain LEN-ORDER" in text
    assert "one sample of a fixed length no two samples forward" in text


def test_equal_losses_have_a_page(tmp_path):
    assert (
        "0.00e+00 1.00e-03"
        in Page(write_align_report(align_result(np.zeros(100)), tmp_path / "a.html").read_text()).text
    )


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_losses_that_are_not_finite_have_a_page(tmp_path, value):
    result = align_result(
        np.zeros(100), passed=False, first_failed_step=2, loss=[2.0] + [value] * 99, max_abs_diff=math.nan
    )
    text = Page(write_align_report(result, tmp_path / "a.html").read_text()).text
    assert (
        "loss (absolute, nats per token) nan 1.00e-03 step 2 is the first with a difference that is not allowed" in text
    )


def test_the_page_of_many_steps_stays_small(tmp_path):
    assert len(page_of(tmp_path, run_lines(6000))) < 1_500_000


def test_running_mean_passes_over_gaps():
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(running_mean(values, 3), [1.0, 2.0, 4.0, 4.0, 5.0, np.nan, np.nan])
