"""Time and peak memory of ckpt-tools on a made-up checkpoint of any size.

    python scripts/measure/bench_ckpt.py --gb 4
    python scripts/measure/bench_ckpt.py --gb 20 --folder scratch

Each command runs in a process of its own; memory is its peak resident set. Weights are a third of the size, moments the
rest, and the largest tensor is the embedding, as in a real model. Twice the size is needed on disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckpt_tools.parameters import moment_shapes
from ckpt_tools.step_folder import write_step
from ms_varlen.checkpoint.tensors import PIECE_BYTES, StoredTensor, from_array
from ms_varlen.models.config import DecoderConfig

RECIPE = """
mode: varlen
data: {{source: pydoc, tokenizer: bytes}}
batch: {{token_budget: 4096}}
model:
  config: {{hidden_size: {hidden}, num_hidden_layers: {layers}, num_attention_heads: {heads}, vocab_size: {vocab}}}
  variable_seq_lengths: true
  seq_length: 4096
  max_position_embeddings: 4096
train: {{steps: 100, learning_rate: 1e-3}}
checkpoint: {{output_dir: {folder}}}
"""


def config_of(size: float) -> DecoderConfig:
    """A decoder of which weights and moments together have about `size` bytes."""
    hidden = 2048 if size > 2e9 else 512
    one = DecoderConfig(hidden_size=hidden, num_hidden_layers=1, num_attention_heads=hidden // 64, vocab_size=32000)
    two = one.model_copy(update={"num_hidden_layers": 2})
    layer = two.parameter_count() - one.parameter_count()
    layers = max(1, round((size / 12 - one.parameter_count()) / layer) + 1)
    return one.model_copy(update={"num_hidden_layers": layers})


def made_up(name: str, shape: tuple[int, ...]) -> StoredTensor:
    """A tensor of random bits that is never in memory as a whole."""
    count = int(np.prod(shape))

    def pieces() -> Iterator[np.ndarray]:
        random = np.random.default_rng(len(name))
        for first in range(0, count, PIECE_BYTES // 4):
            yield random.standard_normal(min(PIECE_BYTES // 4, count - first), np.float32)

    return StoredTensor(name, "F32", shape, "made up", pieces)


def make_run(folder: Path, config: DecoderConfig) -> Path:
    """A run folder of mode varlen with one checkpoint at step 30."""
    shapes = config.parameter_shapes()
    folder.mkdir(parents=True)
    fields = {"hidden": config.hidden_size, "layers": config.num_hidden_layers, "heads": config.num_attention_heads}
    recipe = RECIPE.format(**fields, vocab=config.vocab_size, folder=folder.parent)
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    metrics = {"step": 30, "tokens_real": 4000, "segments": 20}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    optimizer = {name: made_up(name, shape) for name, shape in moment_shapes(shapes).items()}
    optimizer["applied_steps"] = from_array("applied_steps", np.array(30))
    plan = {"epoch": 0, "step": 30, "fingerprint": "made up", "settings": {}, "trained_before": None}
    manifest = {"mode": "varlen", "model_config": config.model_dump(mode="json"), "seq_length": 4096}
    model = {name: made_up(name, shape) for name, shape in shapes.items()}
    return write_step(folder, 30, model, optimizer, json.dumps({"plan": plan}).encode(), manifest, lambda _: None)


def measured(name: str, size: float, *arguments: str) -> dict[str, float | str]:
    """Run a command; its seconds, MB a second and peak memory in MB."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "ckpt_tools.cli", *arguments, "--json"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with status {status}")
    found: dict[str, float | str] = {
        "command": name,
        "seconds": round(seconds, 1),
        "mb_per_second": round(size / seconds / 1e6),
        "peak_memory_mb": round(usage.ru_maxrss / 1e3),
    }
    print(found, file=sys.stderr, flush=True)  # the next one may take minutes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4, help="size of the checkpoint, in GB")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; default the temporary folder")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir=arguments.folder))
    try:
        config = config_of(arguments.gb * 1e9)
        step = make_run(work / "run", config)
        size = sum(file.stat().st_size for file in step.iterdir())
        weights = size / 3
        rows = [measured("inspect", size, "inspect", str(step))]
        rows.append(measured("convert", size, "convert", "--to", "padded", str(step), str(work / "padded")))
        rows.append(measured("verify", 2 * size, "verify", str(step), str(work / "padded")))
        shutil.rmtree(work / "padded")
        rows.append(measured("export-hf bf16", weights, "export-hf", str(step), str(work / "hf"), "--dtype", "bf16"))
        rows.append(measured("import-hf", weights, "import-hf", str(work / "hf"), str(work / "back")))
        shutil.rmtree(work / "back")
        options = ("--fused",)
        rows.append(measured("export-mindformers", size, "export-mindformers", str(step), str(work / "mf"), *options))
    finally:
        shutil.rmtree(work)
    largest = max(int(np.prod(shape)) for shape in config.parameter_shapes().values()) * 4
    print(
        json.dumps({"gb": round(size / 1e9, 2), "largest_tensor_mb": round(largest / 1e6), "results": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
