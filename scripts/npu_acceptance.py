"""Try on one card whatever ms_varlen assumes of it: ``python scripts/npu_acceptance.py > acceptance.json``.

One JSON object goes to stdout: for each check whether it held, its seconds and what was measured. `passed` is true and
the exit status 0 when all that are required held, false and 1 otherwise. Each check runs in a process of its own, since
a kernel that fails may leave a card unusable to its process.

Without a card the attention checks run on the emulator of `FlashAttentionScore`, all in this process. That says nothing
about a card: `passed` is null, and the exit status 2. With ``--emulate``, which tries this script, it is 0 or 1.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Read when MindSpore is loaded.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_varlen.graph.shapes import TokenShapes
from ms_varlen.lengths import SeqLens
from ms_varlen.ops import ascend_attention
from ms_varlen.ops.attention import attention_columns, attention_inputs, declared_columns, varlen_attention
from ms_varlen.ops.body import body_in_use, use_body

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the emulator is in tests.support

CHECK_SECONDS = 900
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
BF16_TOLERANCE = 2e-2  # bfloat16 keeps 8 bits
LENGTHS = [70, 1, 30, 27]

CHECKS: dict[str, Callable[[], dict[str, Any]]] = {}
OPTIONAL = {"ends_int64", "ends_computed_on_device", "repeated_last_end", "jit_level_o1"}
"""Told, and not required: nothing in ms_varlen depends on them. `repeated_last_end` says whether a fixed number of ends
could be used."""

RECIPE = """
mode: varlen
data: {{source: pydoc, tokenizer: bytes, store_dir: {folder}/stores}}
batch: {{token_budget: 1024, max_segments: 64}}
shapes: {{kind: {kind}, divisor: 128}}
model:
  config: {{architecture: llama, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
  variable_seq_lengths: true
  seq_length: 512
  max_position_embeddings: 512
train: {{steps: 4, learning_rate: 1e-3}}
graph: {{compile_cache: {folder}/cache}}
checkpoint: {{output_dir: {folder}/{name}}}
"""


def check(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """List a check under its name; it returns what it measured, and raises when an assumption does not hold."""
    CHECKS[function.__name__] = function
    return function


def on_card() -> bool:
    """Whether MindSpore sees an NPU."""
    return ms.get_context("device_target") == "Ascend"


def tensors(tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k and v on T tokens, bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = [(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [Tensor(rng.standard_normal(shape).astype(np.float32)).astype(ms.bfloat16) for shape in shapes]


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> np.ndarray:
    """Attention by NumPy, segment by segment."""
    arrays = [x.astype(ms.float32).asnumpy().astype(np.float64) for x in (q, k, v)]
    parts, begin = [], 0
    for length in lengths:
        q_SND, k_SND, v_SND = (x[begin : begin + length] for x in arrays)
        k_SND, v_SND = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k_SND, v_SND))
        scores = np.einsum("qnd,knd->nqk", q_SND, k_SND) * HEAD_DIM**-0.5
        scores = np.where(np.triu(np.ones((length, length), bool), 1), -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        parts.append(np.einsum("nqk,knd->qnd", weights / weights.sum(-1, keepdims=True), v_SND))
        begin += length
    return np.concatenate(parts)


@contextlib.contextmanager
def ascend_body() -> Iterator[None]:
    """`varlen_attention` by FlashAttentionScore, or by its emulator where there is no card."""
    from tests.support.flash_attention import flash_attention_score

    use_body("ascend")
    emulated = mock.patch.object(ascend_attention.ops, "flash_attention_score", flash_attention_score)
    try:
        with contextlib.nullcontext() if on_card() else emulated:
            yield
    finally:
        use_body(None)


def attention_error(lengths: list[int], ends: Callable[[np.ndarray], Any] = Tensor) -> dict[str, Any]:
    """Largest error of the operator on sequences of these lengths, and its milliseconds; ends as `ends` makes them."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    q, k, v = tensors(sum(lengths))
    running = np.cumsum(lengths, dtype=np.int32)
    with ascend_body():
        given = (ends(running),)
        out = varlen_attention(q, k, v, given).astype(ms.float32).asnumpy()
        begin = time.perf_counter()
        varlen_attention(q, k, v, given).astype(ms.float32).asnumpy()
    seconds = time.perf_counter() - begin
    error = float(np.abs(out - expected(q, k, v, [length for length in lengths if length])).max())
    assert error < BF16_TOLERANCE, f"the operator's output is off by {error}"
    return {"max_abs_error": error, "ms": round(seconds * 1e3, 3)}


@check
def versions() -> dict[str, Any]:
    names = ("mindspore", "numpy")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version(), "device": ms.get_context("device_target")}


@check
def kernel_against_reference() -> dict[str, Any]:
    return attention_error(LENGTHS)


@check
def ends_int64() -> dict[str, Any]:
    return attention_error(LENGTHS, lambda ends: Tensor(ends.astype(np.int64)))


@check
def ends_computed_on_device() -> dict[str, Any]:
    return attention_error(LENGTHS, lambda ends: ops.cumsum(Tensor(np.diff(ends, prepend=0).astype(np.int32)), 0))


@check
def ends_of_a_padded_tail() -> dict[str, Any]:
    return {f"tail of {tail}": attention_error([70, 31, tail])["max_abs_error"] for tail in (1, 27, 128)}


@check
def repeated_last_end() -> dict[str, Any]:
    return attention_error([*LENGTHS, 0, 0, 0, 0])


@check
def most_segments() -> dict[str, Any]:
    return attention_error([1, 2, 3, 2] * 256)


@check
def gradient_against_reference() -> dict[str, Any]:
    """The operator's gradient against that of the plain reference; the emulator has none, the CPU's body stands in."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    lens = SeqLens.packed(LENGTHS, 128)
    given = tensors(lens.tokens) if on_card() else [x.astype(ms.float32) for x in tensors(lens.tokens)]
    weight = Tensor(np.random.default_rng(1).standard_normal(given[0].shape).astype(np.float32))

    def gradients(body: str, inputs: list[Tensor]) -> list[np.ndarray]:
        use_body(body)
        lengths = attention_inputs(attention_columns(lens, body), body)

        def loss(q, k, v):
            return (varlen_attention(q, k, v, lengths).astype(ms.float32) * weight).sum()

        return [x.astype(ms.float32).asnumpy() for x in ops.grad(loss, (0, 1, 2))(*inputs)]

    own = body_in_use()
    try:
        found = gradients(own, given)
        right = gradients("reference", [x.astype(ms.float32) for x in given])
    finally:
        use_body(None)
    errors = [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(found, right, strict=True)]
    assert max(errors) < BF16_TOLERANCE, f"gradients of q, k, v are off by {errors} of their largest value"
    return {"body": own, "relative_error_qkv": errors}


class AttentionLoss(nn.Cell):
    """A cell whose gradient goes through `varlen_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient = ops.value_and_grad(self.loss, (0, 1, 2))

    def loss(self, q, k, v, *lengths):
        """() fp32."""
        return ops.square(varlen_attention(q, k, v, lengths).astype(ms.float32)).sum()

    def construct(self, q, k, v, *lengths):
        """The loss and its gradients."""
        return self.gradient(q, k, v, *lengths)


def graph_times(jit_level: str) -> dict[str, Any]:
    """One graph for a static T and one for a range: seconds to compile, milliseconds a step, and equal losses."""
    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": jit_level})
    body, dtype = body_in_use(), ms.bfloat16 if on_card() else ms.float32
    found: dict[str, Any] = {"body": body}
    losses = {}
    for kind, axis in (("static", 512), ("dynamic", None)):
        cell = AttentionLoss()
        shaped = [Tensor(shape=[axis, heads, HEAD_DIM], dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        cell.set_inputs(*shaped, *declared_columns(body, axis).values())
        times = []
        for lengths in ([100, 412], [300, 100, 112], [512]):
            lens = SeqLens.packed(lengths, 512)
            inputs = [x.astype(dtype) for x in tensors(512)]
            begin = time.perf_counter()
            loss = cell(*inputs, *attention_inputs(attention_columns(lens, body), body))[0]
            losses.setdefault(tuple(lengths), []).append(float(loss.asnumpy()))
            times.append(time.perf_counter() - begin)
        assert len(cell.compile_cache) == 1, f"{len(cell.compile_cache)} graphs for one declaration"
        found[kind] = {"compile_s": round(times[0], 3), "step_ms": round(min(times[1:]) * 1e3, 3)}
    for static, dynamic in losses.values():
        assert abs(static - dynamic) <= 1e-3 * abs(static), f"static {static} and dynamic {dynamic} losses differ"
    return found


@check
def jit_level_o0() -> dict[str, Any]:
    return graph_times("O0")


@check
def jit_level_o1() -> dict[str, Any]:
    return graph_times("O1")


def trained(folder: Path, name: str, kind: str, rank: int = 0) -> dict[str, Any]:
    """A run of four steps of a small recipe in a process of its own: its summary, with all losses."""
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(folder=folder, name=name, kind=kind))
    command = [sys.executable, "-m", "ms_varlen.cli.app", "train", str(recipe), "--json"]
    environment = {**os.environ, "RANK_ID": str(rank)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (folder / name / "varlen" / "metrics.jsonl").read_text().splitlines()
    return {**json.loads(done.stdout), "losses": [json.loads(line)["loss"] for line in lines]}


@check
def training_and_cache() -> dict[str, Any]:
    """Static and dynamic training agree, graphs are as predicted, and another rank's process loads the same graphs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = {kind: trained(folder, kind, kind) for kind in ("static", "range")}
        second = trained(folder, "second", "range", rank=1)
    for run in (*runs.values(), second):
        assert run["graphs_compiled"] == {"train": 1, "apply": 1}, run["graphs_compiled"]
    static, dynamic = (runs[kind]["losses"] for kind in ("static", "range"))
    apart = max(abs(one - other) for one, other in zip(static, dynamic, strict=True))
    assert apart < BF16_TOLERANCE, f"static {static} and dynamic {dynamic} losses differ"
    assert second["compile_cache"] == "warm", f"the cache of rank 0 is {second['compile_cache']} for rank 1"
    assert second["losses"] == dynamic, f"graphs from the cache gave {second['losses']}, before {dynamic}"
    return {"losses": static, "max_abs_diff": apart, "step_ms": {kind: run["step_ms"] for kind, run in runs.items()}}


@check
def shapes_of_a_range() -> dict[str, Any]:
    """A `Symbol` is enforced: a T that is no multiple of the divisor must be refused before a kernel sees it."""
    from ms_varlen.graph.declare import declared_inputs

    ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": "O0"})

    class Double(nn.Cell):
        def construct(self, x):
            return x + x

    cell = Double()
    cell.set_inputs(*declared_inputs(TokenShapes("range", 64, 256, 64, 8), {"x": "T"}))
    assert cell(Tensor(np.ones(128, np.int32))).shape == (128,)
    with contextlib.suppress(ValueError):
        cell(Tensor(np.ones(100, np.int32)))
        raise AssertionError("T=100 was taken for a multiple of 64")
    return {"refused": True}


def run_check(name: str) -> dict[str, Any]:
    """One check in this process; its errors become part of the result."""
    begin = time.perf_counter()
    try:
        result = {"ok": True, **CHECKS[name]()}
    except Exception as error:  # whatever a card or a compiler raises is what this script is to report
        result = {
            "ok": False,
            "error": f"{type(error).__name__}: {error}"[:2000],
            "where": traceback.format_exc()[-1500:],
        }
    return {**result, "seconds": round(time.perf_counter() - begin, 2)}


def in_own_process(name: str) -> dict[str, Any]:
    """One check in a child, which may crash or hang; libraries may print what they like, its result is in a file."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--check", name, "--output", str(file)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", check=False, timeout=CHECK_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"ok": False, "error": f"no answer within {CHECK_SECONDS} s", "seconds": CHECK_SECONDS}
        if file.is_file():
            return json.loads(file.read_text())
    seconds = round(time.perf_counter() - begin, 2)
    return {
        "ok": False,
        "error": f"ended with status {done.returncode}",
        "where": done.stderr[-1500:],
        "seconds": seconds,
    }


def verdict(results: dict[str, dict[str, Any]], card: bool, emulate: bool) -> tuple[bool | None, int]:
    """Whether a card passed, None without one, and the exit status.

    Args:
        results: of the checks, by name.
        card: whether they ran on one.
        emulate: whether the emulator was asked for.
    """
    held = all(result["ok"] for result in results.values() if result["required"])
    status = 0 if held else 1
    return (held, status) if card else (None, status if emulate else 2)


def told(name: str, result: dict[str, Any]) -> str:
    """One line about a check, for people."""
    failed = "FAILED" if result["required"] else "not so (optional)"
    return f"{'held' if result['ok'] else failed}: {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Try on one card whatever ms_varlen assumes of it; prints one JSON.")
    parser.add_argument("--check", choices=sorted(CHECKS), help="run one check alone, in this process")
    parser.add_argument("--output", type=Path, help="with --check: write its result to this file")
    parser.add_argument("--emulate", action="store_true", help="without a card: try this script itself")
    given = parser.parse_args()
    if given.check:
        result = run_check(given.check)
        if given.output:
            given.output.write_text(json.dumps(result))
        else:
            print(json.dumps(result))
        return 0 if result["ok"] else 1
    run = in_own_process if on_card() else run_check
    results = {}
    for name in CHECKS:
        results[name] = {**run(name), "required": name not in OPTIONAL}
        print(told(name, results[name]), file=sys.stderr, flush=True)
    passed, status = verdict(results, on_card(), given.emulate)
    emulated = "FlashAttentionScore was emulated: nothing here says anything about a card"
    print(json.dumps({"passed": passed, "note": None if on_card() else emulated, "checks": results}))
    return status


if __name__ == "__main__":
    sys.exit(main())
