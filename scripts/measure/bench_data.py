"""How fast a corpus becomes a token store: MB/s, peak memory, and the time of a reuse.

    python scripts/measure/bench_data.py --megabytes 1000

Makes JSON lines of the standard library's docstrings in a temporary folder, prepares them with the byte tokenizer and
with a BPE trained on the fly, and compares the BPE with the rate of the `tokenizers` library alone on the same texts
(its faster call, `encode_batch_fast`, on all cores). Prints one JSON object; needs about four times the corpus on disk.
On a machine that others use, the CPU seconds say more than the rates.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ms_varlen.data.sources.source import open_source

PREPARE = """
import json, sys, time
from ms_varlen.data.config import DataConfig
from ms_varlen.data.store.store import prepare_store
begin = time.perf_counter()
store = prepare_store(DataConfig(**json.loads(sys.argv[1])), 2048)
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "tokens": store.train.total_tokens + store.eval.total_tokens}))
"""
SAMPLE_MB = 50
"""Text that the tokenizers library is timed on."""
SETTLING_S = 2.5
"""Files changed less than two seconds ago are read again at the next start."""


def main(argv: list[str] | None = None) -> int:
    """Run the measurement; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the JSON lines")
    parser.add_argument("--median", type=int, default=700, help="characters of a document")
    parser.add_argument("--p99", type=int, default=20000, help="characters that one document in a hundred exceeds")
    parser.add_argument("--workers", type=int, default=None, help="as data.workers; default one a core")
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary folder is made")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        text = "\n".join(record.fields["text"] for record in open_source("pydoc"))
        size = write_corpus(folder / "corpus.jsonl", text, options)
        train_bpe(text, folder / "tokenizer.json")
        time.sleep(SETTLING_S)
        config = {
            "source": str(folder / "corpus.jsonl"),
            "store_dir": str(folder / "stores"),
            "workers": options.workers,
        }
        result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "megabytes": size / 1e6}
        for tokenizer in ("bytes", str(folder / "tokenizer.json")):
            result[Path(tokenizer).stem] = measure({**config, "tokenizer": tokenizer}, size)
        alone = result["tokenizers_alone"] = library_rate(folder)
        bpe = result["tokenizer"]
        result["share_of_its_rate"] = bpe["mb_per_s"] / alone["mb_per_s"]
        result["share_of_its_rate_by_cpu"] = alone["cpu_seconds_per_gb"] / (bpe["cpu_seconds"] / size * 1e9)
    print(json.dumps(result, indent=1))
    return 0


def documents(text: str, options: argparse.Namespace) -> Iterator[str]:
    """Pieces of `text` of lognormal lengths, endlessly."""
    random = np.random.default_rng(0)
    sigma = np.log(options.p99 / options.median) / 2.326
    while True:
        lengths = np.maximum(random.lognormal(np.log(options.median), sigma, 1000), 1).astype(int).tolist()
        for length, start in zip(lengths, random.integers(0, len(text), 1000).tolist(), strict=True):
            yield text[start : start + length]


def write_corpus(path: Path, text: str, options: argparse.Namespace) -> int:
    """Write JSON lines; their bytes."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents(text, options):
            size += file.write(json.dumps({"text": document}) + "\n")
            if size >= options.megabytes * 1e6:
                return size
    return size


def train_bpe(text: str, path: Path) -> None:
    """A byte-level BPE of 16,000 tokens on the docstrings."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=16000, special_tokens=["<|endoftext|>"], initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    tokenizer.save(str(path))


def measure(config: dict[str, Any], size: int) -> dict[str, float]:
    """Prepare a store and open it again, each in a fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    built, memory = run(config)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    reused, _ = run(config)
    return {
        "seconds": built["seconds"],
        "mb_per_s": size / built["seconds"] / 1e6,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "tokens": built["tokens"],
        "peak_memory_mb": memory,
        "reuse_seconds": reused["seconds"],
    }


def run(config: dict[str, Any]) -> tuple[dict[str, float], float]:
    """What a process that prepares a store prints, and the most memory of it and its children, in MB."""
    process = subprocess.Popen([sys.executable, "-c", PREPARE, json.dumps(config)], stdout=subprocess.PIPE)
    peak = [0.0]
    watcher = threading.Thread(target=watch, args=(process, peak))
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"preparing must end with status 0, got {process.returncode}; see above")
    return json.loads(output), peak[0]


def watch(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Keep the largest resident memory of a process and its children in `peak`, in MB."""
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found = sum(map(resident, [process.pid, *all_children(process.pid)])) if children.exists() else 0.0
        peak[0] = max(peak[0], found)
        time.sleep(0.05)


def all_children(pid: int) -> list[int]:
    """Processes that any thread of `pid` started."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in path.read_text().split()]
        except OSError:  # the thread has just ended
            continue
    return found


def resident(pid: int) -> float:
    """Resident memory of a process in MB, 0 when it has just ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def library_rate(folder: Path) -> dict[str, float]:
    """MB of JSON lines a second whose texts the tokenizers library alone turns into ids, and what that costs."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts, size = [], 0
    with (folder / "corpus.jsonl").open("rb") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size >= SAMPLE_MB * 1e6:
                break
    begin, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), 1000):
        tokenizer.encode_batch_fast(texts[start : start + 1000])
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"mb_per_s": size / seconds / 1e6, "cpu_seconds_per_gb": cpu / size * 1e9}


if __name__ == "__main__":
    sys.exit(main())
