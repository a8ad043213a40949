"""The same documents through MindFormers' packing handlers and through our loader: labels, samples, filled share.

Every row of the tables is what the code of MindFormers 1.9 does with the documents, or with a few made-up ones where a
defect needs them. Nothing is trained. The documents are random letters of lognormal lengths (median 180, P99 2048).

    python scripts/measure/compare_mindformers_packing.py                       # about 25 s
    python scripts/measure/compare_mindformers_packing.py --documents 500 --json
"""

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ms_varlen.bridge.config import PACKED_COLUMNS
from ms_varlen.bridge.feed import open_feed
from ms_varlen.bridge.install import require_mindformers
from ms_varlen.errors import VarlenError

IGNORED = -100
END_OF_TEXT = 256
ENTRIES = 128


@dataclasses.dataclass
class Audit:
    """What rows hold.

    Attributes:
        targets: places with a loss.
        wrong: of them, those whose label is not the next token of the same sample.
        tokens: of samples.
        places: of rows.
        samples: segments that hold a sample.
    """

    targets: int = 0
    wrong: int = 0
    tokens: int = 0
    places: int = 0
    samples: int = 0

    def add(self, ids: np.ndarray, labels: np.ndarray, mask: np.ndarray, ends: np.ndarray, real: int) -> None:
        """Count a row.

        Args:
            ids, labels, mask: [T] ints.
            ends: [B] ints, running ends of the samples alone.
            real: number of samples among them.
        """
        expected = np.full(ids.size, IGNORED)
        for start, end in zip([0, *ends[: real - 1]], ends[:real], strict=True):
            expected[start : end - 1] = ids[start + 1 : end]
        self.targets += int(mask.sum())
        self.wrong += int(((labels != expected) & (mask == 1)).sum())
        self.tokens += int(ends[real - 1])
        self.places += ids.size
        self.samples += real


def made_up_documents(count: int, seed: int) -> list[str]:
    """Random letters; their lognormal lengths have median 180 and P99 2048, and go up to 8192."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(180), 1.0453, count), 8, 8192).astype(int)
    return [bytes(random.integers(97, 123, length, np.uint8)).decode() for length in lengths]


def tokens_of(text: str) -> list[int]:
    """Bytes and end-of-text, as our byte tokenizer makes them."""
    return [*text.encode(), END_OF_TEXT]


def packed_by_mindformers(examples: list[dict[str, list[int]]], row_length: int, strategy: str) -> list[dict]:
    """Rows of their `PackingHandler`, as their data loader hands them out: `actual_seq_len` filled up with T.

    Each also has `raw_ends`, what the handler wrote.
    """
    from datasets import Dataset
    from mindformers.dataset.dataloader.hf_dataloader import HFDataLoaderConfig, HFDataset
    from mindformers.dataset.handler import PackingHandler

    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        packed = PackingHandler(seq_length=row_length, pack_strategy=strategy)(Dataset.from_list(examples))
    process = [{"type": "PackingHandler"}]
    config = HFDataLoaderConfig(load={}, process=process, create_compressed_eod_mask=True)
    rows = HFDataset(config, packed)
    names = rows.column_names
    return [
        {**dict(zip(names, rows[i], strict=True)), "raw_ends": np.array(packed[i]["actual_seq_len"])}
        for i in range(len(rows))
    ]


def audit_mindformers(rows: list[dict]) -> Audit:
    """What rows of the strategy `pack` hold."""
    audit = Audit()
    for row in rows:
        ends = row["raw_ends"]
        audit.add(row["input_ids"], row["labels"], row["loss_mask"], ends, ends.size)
    return audit


def alpaca_examples(documents: list[str], row_length: int) -> list[dict[str, list[int]]]:
    """Documents as answers of their Alpaca handler, whose labels are shifted by one already."""
    from mindformers.dataset.handler import AlpacaInstructDataHandler

    handler = AlpacaInstructDataHandler(seq_length=row_length, padding=False)
    handler.tokenizer = lambda text: {"input_ids": list(text.encode())}
    made = [handler.process({"instruction": "Go on.", "output": text}) for text in documents]
    return [{name: made_one[name].tolist() for name in ("input_ids", "labels")} for made_one in made]


def audit_ours(documents: list[str], row_length: int) -> Audit:
    """What one epoch of our loader holds, overlong documents split, each piece a sample."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "documents.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        data = {"source": str(source), "tokenizer": "bytes", "store_dir": folder, "min_tokens": 2}
        keys = {"data": data, "seq_length": row_length, "create_compressed_eod_mask": True}
        feed, audit = open_feed(keys, PACKED_COLUMNS), Audit()
        for index in range(len(feed)):
            row = feed.row(index)
            real = feed.workload.plans.epoch(0).micro_batch(index, 0).size
            audit.add(row["input_ids"], row["labels"], row["loss_mask"], row["actual_seq_len"], real)
    return audit


def truncated_rows(examples: list[dict[str, list[int]]], row_length: int) -> tuple[int, int]:
    """Rows of their strategy `truncate`, and those whose `actual_seq_len` is no list of running ends up to T."""
    rows = packed_by_mindformers(examples, row_length, "truncate")
    bad = [row for row in rows if (np.diff(row["actual_seq_len"]) < 0).any() or row["actual_seq_len"][-1] != row_length]
    return len(rows), len(bad)


def last_end_of_a_full_list(row_length: int) -> int:
    """The last entry of a row with exactly 128 samples and a padded tail."""
    examples = [{"input_ids": [1] * 10, "labels": [1] * 10} for _ in range(ENTRIES)]
    examples.append({"input_ids": [1] * row_length, "labels": [1] * row_length})
    return int(packed_by_mindformers(examples, row_length, "pack")[0]["actual_seq_len"][-1])


def error_of_a_small_data_set(row_length: int) -> str:
    """What their handler says of documents that fit in one row."""
    try:
        packed_by_mindformers([{"input_ids": [1] * 10, "labels": [1] * 10}] * 3, row_length, "pack")
    except RuntimeError as error:
        return str(error)
    return "no error"


def columns_that_reach_the_model(rows: list[dict], columns: list[str]) -> list[str]:
    """What is left of packed rows after their batching with these `input_columns`."""
    from mindformers.dataset.causal_language_model_dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig
    from mindspore.dataset import GeneratorDataset

    names = ["input_ids", "labels", "loss_mask", "position_ids"]
    dense = [
        (*(row[name] for name in names), np.ones((1, row["input_ids"].size, row["input_ids"].size), np.int8))
        for row in rows[:1]
    ]
    loader = GeneratorDataset(dense, [*names, "attention_mask"], shuffle=False)
    config = MindFormerConfig(data_loader=loader, input_columns=columns, batch_size=1, drop_remainder=True)
    return CausalLanguageModelDataset(config).get_col_names()


def pairs_across_samples(rows: list[dict]) -> float:
    """Share of the causal pairs of query and key in rows that lie in two samples: what a lost mask lets attend."""
    within = sum(float(np.square(np.diff(row["raw_ends"], prepend=0), dtype=np.float64).sum()) for row in rows)
    total = sum(float(row["raw_ends"][-1]) ** 2 for row in rows)
    return 1 - within / total


def compare(count: int, row_length: int, seed: int) -> dict[str, Any]:
    """Run everything; see the module."""
    documents = made_up_documents(count, seed)
    plain = [{"input_ids": tokens_of(text), "labels": tokens_of(text)} for text in documents]
    rows = packed_by_mindformers(plain, row_length, "pack")
    theirs, ours = audit_mindformers(rows), audit_ours(documents, row_length)
    alpaca = alpaca_examples(documents, row_length)
    twice = audit_mindformers(packed_by_mindformers(alpaca, row_length, "pack"))
    truncated, bad = truncated_rows(plain, row_length)
    four = ["input_ids", "labels", "loss_mask", "position_ids"]
    overlong = sum(len(example["input_ids"]) > row_length for example in plain)
    corpus = sum(len(example["input_ids"]) for example in plain)
    return {
        "documents": count,
        "tokens": corpus,
        "row_length": row_length,
        "overlong": overlong,
        "pack": dataclasses.asdict(theirs),
        "alpaca_then_pack": dataclasses.asdict(twice),
        "ours": dataclasses.asdict(ours),
        "pack_dropped_tokens": corpus - theirs.tokens,
        "ours_dropped_tokens": corpus - ours.tokens,
        "truncate_rows": truncated,
        "truncate_rows_without_running_ends": bad,
        "last_end_with_128_samples": last_end_of_a_full_list(row_length),
        "error_of_a_small_data_set": error_of_a_small_data_set(row_length),
        "columns_of_four": columns_that_reach_the_model(rows, four),
        "pairs_across_samples": pairs_across_samples(rows),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result for people."""
    summary = Table(title=f"one epoch of {result['documents']} documents", title_justify="left")
    for name in ("", "wrong targets", "samples", "tokens dropped", "filled share"):
        summary.add_column(name, justify="right" if name else "left")
    # The Alpaca handler cuts overlong documents instead, prompts counted in.
    dropped = {
        "pack": f"{result['pack_dropped_tokens']:,}",
        "alpaca_then_pack": "cut",
        "ours": f"{result['ours_dropped_tokens']:,}",
    }
    named = {
        "pack": "MindFormers, PackingHandler",
        "alpaca_then_pack": "MindFormers, Alpaca + PackingHandler",
        "ours": "ms_varlen, VarlenDataLoader",
    }
    for key, name in named.items():
        audit = result[key]
        share = audit["tokens"] / audit["places"]
        wrong = f"{audit['wrong']:,} of {audit['targets']:,}"
        summary.add_row(name, wrong, f"{audit['samples']:,}", dropped[key], f"{share:.2%}")
    length = result["row_length"]
    defects = Table(title="defects, each by running the code of MindFormers 1.9", title_justify="left")
    defects.add_column("defect")
    defects.add_column("found")
    for defect, found in (
        (
            "labels shifted by the Alpaca handler and again in packing",
            f"{result['alpaca_then_pack']['wrong']:,} targets",
        ),
        ("last label of each sample is the pad id 0, with loss", f"{result['pack']['wrong']:,} targets"),
        ("documents longer than a row are dropped silently", f"{result['overlong']:,} documents"),
        (
            "strategy truncate writes plain lengths as running ends",
            f"{result['truncate_rows_without_running_ends']} of {result['truncate_rows']} rows",
        ),
        (f"128 samples and a tail: the last end is not T = {length}", str(result["last_end_with_128_samples"])),
        ("documents that fit in one row", result["error_of_a_small_data_set"].split(",")[0]),
        (
            "four input_columns (their finetune_qwen3.yaml): no mask",
            f"{', '.join(result['columns_of_four'])}; {result['pairs_across_samples']:.1%} of pairs cross samples",
        ),
    ):
        defects.add_row(defect, found)
    return [summary, defects]


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--row-length", type=int, default=2048, help="tokens, at least 2048")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        require_mindformers()
        with contextlib.redirect_stdout(sys.stderr):  # MindFormers logs to stdout
            result = compare(arguments.documents, arguments.row_length, arguments.seed)
    except VarlenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(result))
    else:
        for table in tables(result):
            Console().print(table)
    return 0


if __name__ == "__main__":
    logging.disable(logging.INFO)
    sys.exit(main())
