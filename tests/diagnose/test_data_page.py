import json
import subprocess
import sys

import pytest

from ms_varlen.diagnose.advise.stats import stats_recipe
from ms_varlen.diagnose.pages.data_page import data_report, data_tables, example_tables, write_data_page
from tests.support.page import Page

# The program in a process of its own, which must not load MindSpore.
WITHOUT_MINDSPORE = """
import sys
from ms_varlen.cli import app as cli
status = cli.main(sys.argv[1:])
sys.exit("MindSpore was imported" if "mindspore" in sys.modules else status)
"""

RECORDS = [
    {"prompt": "2 + 2? ", "completion": "four"},
    {"prompt": "2 + 3? ", "completion": " "},
    {"prompt": "2 + 2? ", "completion": "four"},
    {"prompt": "Say: ", "completion": "[red]x[/no] <b>\x1b[31m&\n"},
    {"prompt": "a" * 40, "completion": "b"},
    {"prompt": "a", "completion": "b" * 40},
]
OVERRIDES = ["data.overlong=truncate", "data.deduplicate=true"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "c.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return folder


@pytest.fixture(scope="module")
def result(corpus):
    overrides = [*OVERRIDES, f"data.store_dir={corpus}/stores"]
    target = str(corpus / "c.jsonl")
    return data_report(target, stats_recipe(target, "bytes", 32, overrides))


def test_the_report_accounts_for_every_document(corpus, result):
    path = corpus / "c.jsonl"
    cleaning = result["cleaning"]["all"]
    counts = {key.removeprefix("documents_"): count for key, count in cleaning.items() if key.startswith("documents_")}
    assert counts == {
        "in": 6,
        "kept": 3,
        "cut": 1,
        "empty": 1,
        "control": 0,
        "duplicate": 1,
        "short": 0,
        "unsupervised": 1,
        "overlong": 0,
        "with_control": 1,
    }
    assert result["examples"] == {
        "empty": [{"where": f"{path} line 2", "text": "2 + 3?  ", "tokens": 9}],
        "duplicate": [{"where": f"{path} line 3", "text": "2 + 2? four", "tokens": 12}],
        "with_control": [
            {"where": f"{path} line 4", "text": r"Say: [red]x[/no] <b>\x1b[31m&\n", "tokens": 28},
        ],
        "unsupervised": [{"where": f"{path} line 5", "text": "a" * 40 + "b", "tokens": 42}],
        "cut": [{"where": f"{path} line 6", "text": "a" + "b" * 40, "tokens": 42}],
    }
    assert result["sources"] == {"train": {"name": "c.jsonl", "kind": "completion", "passed_over": {}}}
    assert result["samples"] == {
        "train": {"samples": 3, "tokens": 12 + 28 + 32, "targets": 5 + 23 + 31, "longest": 32},
        "eval": {"samples": 0, "tokens": 0, "targets": 0, "longest": 0},
    }
    assert result["rules"] == {
        "min_tokens": 2,
        "overlong": "truncate",
        "keep": "head",
        "deduplicate": True,
        "control_characters": "keep",
        "labels_shifted": False,
        "eval_fraction": 0.0,
    }


def test_tables_are_those_numbers(result):
    tables = {table.title: [list(row) for row in table.rows] for table in data_tables(result)}
    assert tables["Where documents and tokens went"][3:6] == [
        ["removed: empty", "1", "9", "6.21%"],
        ["removed: control", "0", "0", "0.00%"],
        ["removed: duplicate", "1", "12", "8.28%"],
    ]
    assert tables["Sources"] == [
        ["training", "c.jsonl", "completion: prompts and completions, loss on the completions", "nothing"]
    ]
    assert tables["Tokenizer"][2] == ["end-of-text", "256, appended to every document"]
    assert [table.title for table in example_tables(result)] == [
        "Removed, empty: no text or no completion, or white space only",
        "Removed, duplicate: the same as a document before",
        "Removed, unsupervised: no token with a loss in what would be kept",
        "Cut: kept in part",
        "Control or replacement characters, which stayed or were taken out",
    ]


def test_the_page_shows_texts_and_runs_none(corpus, result):
    page = Page(write_data_page(result, corpus / "pages" / "data.html").read_text())
    assert all(reference.startswith("data:image/svg+xml") for reference in page.references)
    assert len(page.references) == 2
    assert r"Say: [red]x[/no] <b>\x1b[31m&\n" in page.text
    for words in ("Documents read 6", "Kept 3", "Removed 3 empty 1, duplicate 1, unsupervised 1", "1 of 1 documents"):
        assert words in page.text


def test_a_corpus_without_faults_says_so(corpus):
    path = corpus / "clean.jsonl"
    path.write_text('{"text": "abc"}\n')
    overrides = [f"data.store_dir={corpus}/stores"]
    result = data_report(str(path), stats_recipe(str(path), None, 32, overrides))
    page = Page(write_data_page(result, corpus / "clean.html").read_text())
    assert "No document was removed or cut." in page.text


def test_the_command_needs_no_mindspore(corpus):
    arguments = ["data", str(corpus / "c.jsonl"), *OVERRIDES, f"data.store_dir={corpus}/stores", "--seq-length", "32"]
    command = [sys.executable, "-c", WITHOUT_MINDSPORE, *arguments]
    done = subprocess.run([*command, "--report", str(corpus / "d.html")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert r"[red]x[/no]" in done.stdout
    assert "\x1b" not in done.stdout
    assert (corpus / "d.html").is_file()
