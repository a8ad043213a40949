"""What became of a corpus: what was found, what was kept, removed and cut, with examples. Needs no MindSpore.

All of it was written down when the token store was built; here it is only shown. The terminal and the page show the
same tables.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.store.build import Progress
from ms_varlen.data.store.files import SPLITS
from ms_varlen.data.store.store import TokenStore, prepare_store
from ms_varlen.data.tokens.cleaning import CUT, REMOVED, WITH_CONTROL
from ms_varlen.data.tokens.records import ABOUT
from ms_varlen.diagnose.pages.figures import length_figure, svg_data
from ms_varlen.diagnose.pages.planning_pages import LENGTH_ROWS, PageTable
from ms_varlen.diagnose.pages.run_page import render
from ms_varlen.files import write_atomically
from ms_varlen.planning.statistics import length_histogram, length_statistics
from ms_varlen.recipe.recipe import Recipe

SPLIT_NAMES = {"train": "training", "eval": "evaluation"}
RULES = (
    "min_tokens",
    "overlong",
    "keep",
    "deduplicate",
    "control_characters",
    "labels_shifted",
    "eval_fraction",
)
"""Keys of the `data` section that decide what is kept."""
EXAMPLE_ROWS = {
    **{reason: f"removed, {reason}: {words}" for reason, words in REMOVED.items()},
    CUT: "cut: kept in part",
    WITH_CONTROL: "control or replacement characters, which stayed or were taken out",
}


def data_report(target: str, recipe: Recipe, progress: Progress | None = None) -> dict[str, Any]:
    """The numbers and examples of `ms-varlen data`.

    Args:
        target: what the command was given.
        recipe: its recipe.
        progress: called while the token store is built.
    Returns:
        JSON values: sources and kinds, tokenizer, rules, cleaning by split, samples, lengths, examples.
    """
    store = prepare_store(recipe.data, recipe.model.seq_length, progress)
    manifest = store.manifest
    ledgers = {**store.ledgers, "all": store.ledgers["train"] + store.ledgers["eval"]}
    tables = {"train": store.train, "eval": store.eval}
    return {
        "target": target,
        "store": str(store.folder),
        "seq_length": store.seq_length,
        "sources": {
            split: {"name": source["name"], "kind": manifest["kind"][split], "passed_over": source["skipped"]}
            for split, source in manifest["sources"].items()
        },
        "tokenizer": manifest["tokenizer"],
        "rules": {key: getattr(recipe.data, key) for key in RULES},
        "cleaning": {split: dict(vars(ledger)) for split, ledger in ledgers.items()},
        "samples": {
            split: {
                "samples": len(table),
                "tokens": table.total_tokens,
                "targets": table.total_targets,
                "longest": table.longest,
            }
            for split, table in tables.items()
        },
        "lengths": {name: length_statistics(lengths) for name, lengths in _lengths(store).items()},
        "histograms": {name: length_histogram(lengths) for name, lengths in _lengths(store).items()},
        "examples": manifest["examples"],
    }


def _lengths(store: TokenStore) -> dict[str, np.ndarray]:
    """Tokens of documents before cutting, and of samples, where there are any."""
    found = {
        "documents": np.concatenate([store.train.document_lengths, store.eval.document_lengths]),
        "train": np.asarray(store.train.lengths),
        "eval": np.asarray(store.eval.lengths),
    }
    return {name: lengths for name, lengths in found.items() if lengths.size}


def data_tables(result: Mapping[str, Any]) -> list[PageTable]:
    """The tables of `ms-varlen data`; examples apart."""
    tokenizer, lengths = result["tokenizer"], result["lengths"]
    sources = [
        [
            SPLIT_NAMES[split],
            source["name"],
            f"{source['kind']}: {ABOUT[source['kind']]}",
            _counts(source["passed_over"]),
        ]
        for split, source in result["sources"].items()
    ]
    used = [split for split in SPLITS if result["samples"][split]["samples"]]
    samples = [
        [
            SPLIT_NAMES[split],
            *(f"{result['samples'][split][key]:,}" for key in ("samples", "tokens", "targets", "longest")),
        ]
        for split in used
    ]
    columns = ["documents", *used]
    length_rows = [["count", *(f"{lengths[name]['samples']:,}" for name in columns)]]
    length_rows += [[words, *(f"{lengths[name][key]:,.0f}" for name in columns)] for key, words in LENGTH_ROWS.items()]
    about = {
        "name": tokenizer["name"],
        "vocabulary": f"{tokenizer['vocab_size']:,}",
        "end-of-text": tokenizer["end_of_text"],
        "beginning-of-text": tokenizer["beginning_of_text"],
        "pad": tokenizer["pad"],
    }
    if all(source["kind"] in ("messages", "tokens") for source in result["sources"].values()):
        about = {key: about[key] for key in ("name", "vocabulary", "pad")}  # nothing is added to these kinds
    return [
        PageTable(
            "Where documents and tokens went",
            ["", "documents", "tokens", "share"],
            _ledger_rows(result["cleaning"]["all"]),
            ["documents that were cut are among the kept ones; share: of tokens, end-of-text included"],
        ),
        PageTable(
            "Lengths, tokens",
            ["", "documents", *(f"{SPLIT_NAMES[split]} samples" for split in used)],
            length_rows,
            [f"documents: kept or overlong ones, before cutting; samples: at most {result['seq_length']:,}"],
        ),
        PageTable(
            "Samples",
            ["", "samples", "tokens", "with a loss", "longest"],
            samples,
            ["with a loss: supervised, and not the first of a sample"],
        ),
        PageTable("Sources", ["", "name", "records", "passed over"], sources, [], wide=True),
        PageTable("Tokenizer", ["", "value"], [[key, str(value)] for key, value in about.items()], [], wide=True),
        PageTable("Rules", ["data.", "value"], [[k, _shown(v)] for k, v in result["rules"].items()], [], wide=True),
    ]


def example_tables(result: Mapping[str, Any]) -> list[PageTable]:
    """The first documents of every reason to remove or cut one."""
    cleaning = result["cleaning"]["all"]
    return [
        PageTable(
            f"{words[0].upper()}{words[1:]}",
            ["where", "tokens", "begins with"],
            [[example["where"], f"{example['tokens']:,}", example["text"]] for example in result["examples"][reason]],
            [f"{len(result['examples'][reason]):,} of {cleaning[f'documents_{reason}']:,} documents"],
            wide=True,
        )
        for reason, words in EXAMPLE_ROWS.items()
        if reason in result["examples"]
    ]


def _ledger_rows(cleaning: Mapping[str, int]) -> list[list[str]]:
    names = {"in": "read", "kept": "kept", CUT: "cut"} | {reason: f"removed: {reason}" for reason in REMOVED}
    total = max(cleaning["tokens_in"], 1)
    return [
        [
            words,
            f"{cleaning[f'documents_{key}']:,}",
            f"{cleaning[f'tokens_{key}']:,}",
            f"{cleaning[f'tokens_{key}'] / total:.2%}",
        ]
        for key, words in names.items()
    ]


def write_data_page(result: Mapping[str, Any], path: Path) -> Path:
    """Write the page of `ms-varlen data`; missing folders are made. Returns `path`."""
    cleaning, samples = result["cleaning"]["all"], result["samples"]
    removed = {reason: cleaning[f"documents_{reason}"] for reason in REMOVED if cleaning[f"documents_{reason}"]}
    targets, tokens = (sum(entry[key] for entry in samples.values()) for key in ("targets", "tokens"))
    headline = [
        _number("Documents read", f"{cleaning['documents_in']:,}", f"{cleaning['tokens_in']:,} tokens"),
        _number("Kept", f"{cleaning['documents_kept']:,}", f"{cleaning['tokens_kept']:,} tokens"),
        _number("Removed", f"{sum(removed.values()):,}", _counts(removed)),
        _number("Cut", f"{cleaning['documents_cut']:,}", f"{cleaning['tokens_cut']:,} tokens cut off"),
        _number("Training samples", f"{samples['train']['samples']:,}", f"{samples['eval']['samples']:,} to evaluate"),
        _number("Tokens with a loss", f"{targets / tokens:.1%}", f"{targets:,} of {tokens:,}"),
    ]
    figures = []
    for name, title in (("documents", "Lengths of documents"), ("train", "Lengths of training samples")):
        histogram, lengths = result["histograms"][name], result["lengths"][name]
        marks = {"P50": lengths["p50"], "P90": lengths["p90"], "P99": lengths["p99"], "max": lengths["max"]}
        text = "Before cutting, tokens." if name == "documents" else f"At most {result['seq_length']:,} tokens."
        figures.append((title, text, svg_data(length_figure(histogram["edges"], histogram["counts"], marks))))
    page = render(
        "data.html.j2",
        title=f"Data of {Path(result['target']).name}",
        under=result["store"],
        headline=headline,
        figures=figures,
        tables=data_tables(result),
        examples=example_tables(result),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [page.encode()])
    return path


def _number(name: str, value: str, note: str) -> dict[str, Any]:
    return {"name": name, "value": value, "note": note, "bad": False}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items()) or "nothing"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
