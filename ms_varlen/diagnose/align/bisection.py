"""Bisection: on which batch, sample, layer and tensor two layouts of the same samples begin to differ.

Batches come simplest first: one sample whose segment is all of T (no length can be wrong), rows of one length, a batch
of one, growing variation, and at last the micro-batches that failed; forward before backward. They take the data path
of training, so a fault anywhere on it shows here. Everything runs in PyNative mode and compiles nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_varlen.batches.dataset import MicroBatches
from ms_varlen.batches.layout import Layout
from ms_varlen.batches.micro_batch import COLUMNS, Columns, MicroBatch, count_supervised
from ms_varlen.batches.samples import ArraySamples
from ms_varlen.diagnose.align.alignment import Bisection, Rung, gradient_difference
from ms_varlen.diagnose.align.attention_faults import name_attention_fault
from ms_varlen.diagnose.lint.columns import Finding
from ms_varlen.diagnose.lint.lint import lint_batch
from ms_varlen.errors import VarlenError
from ms_varlen.graph.shapes import TokenShapes, round_up
from ms_varlen.lengths import SeqLens
from ms_varlen.limits import IGNORE_INDEX
from ms_varlen.models.decoder import CausalLM, CausalLMLoss
from ms_varlen.modes import Mode
from ms_varlen.train.graphs import AttentionPath
from ms_varlen.workload.workload import Workload

LOSS_TOLERANCE, GRADIENT_TOLERANCE, TENSOR_TOLERANCE = 2e-5, 1e-4, 1e-4
MOST_SAMPLES = 4
LENGTHS_OFF = "lengths off, one sample in one segment"
FIXED_LENGTH = 48
TENSORS = ("v", "q", "k", "attention output")
"""In the order of blame: positions move q and k alone, ids move v as well."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of one rung, and the layout that the mode gives them."""

    rung: str
    samples: list[np.ndarray]
    supervised: list[np.ndarray] | None
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Numbers of one layout: loss per token, gradients by name, each layer's q, k, v and output, and its lengths."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    layers: list[dict[str, np.ndarray]]
    columns: MicroBatch
    lens: SeqLens


class Recorder:
    """An attention that records its inputs and its output; PyNative only."""

    def __init__(self, path: AttentionPath):
        self._attend = path.attend
        self.layers: list[dict[str, np.ndarray]] = []

    def __call__(self, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, lengths: tuple) -> Tensor:
        out_TND = self._attend(q_TND, k_TND, v_TND, lengths)
        named = zip(("q", "k", "v", "attention output"), (q_TND, k_TND, v_TND, out_TND), strict=True)
        self.layers.append({name: tensor.asnumpy() for name, tensor in named})
        return out_TND


def bisect(
    workload: Workload,
    parts: list[np.ndarray],
    weights: Mapping[str, np.ndarray],
    ours: AttentionPath,
    padded: AttentionPath,
) -> Bisection:
    """Find the simplest batch on which the recipe's layout and dense padded rows differ, and where it begins.

    Args:
        workload: the recipe's.
        parts: sample ids of the micro-batches of the step that failed.
        weights: of the model at that step, by name.
        ours, padded: the two attentions.
    """
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        tried: list[Rung] = []
        for batch, ids in _rungs(workload, parts):
            try:
                stage, found, expected = _compare(workload, batch, weights, ours, padded)
            except VarlenError as error:
                return Bisection(
                    rung=batch.rung,
                    rungs=tried,
                    stage="batch check",
                    code=error.code or "LOSS-DIFFERS",
                    text=str(error),
                )
            tried.append(Rung(batch.rung, stage))
            if stage is not None:
                return dataclasses.replace(_locate(batch, ids, found, expected, stage), rungs=tried, stage=stage)
        return Bisection(rungs=tried, code="LOSS-DIFFERS", text="no batch differs at equal weights: drift")
    finally:
        ms.set_context(mode=before)


def _rungs(workload: Workload, parts: list[np.ndarray]) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield batches and their sample ids, from the simplest to the micro-batches that failed."""
    table, layout, divisor = workload.store.train, workload.layout, workload.recipe.shapes.divisor
    lengths = np.asarray(table.lengths)
    ids = np.concatenate(parts)
    several = ids[: min(MOST_SAMPLES, layout.rows or MOST_SAMPLES)]
    fixed = max(2, min(FIXED_LENGTH, int(lengths[several].min())))
    row_length = round_up(fixed, divisor)
    shapes = TokenShapes("static", several.size * row_length, several.size * row_length, divisor, 2 * several.size)
    rows = Layout(Mode.PADDED, shapes, max(row_length, layout.seq_length), rows=several.size, row_lengths=(row_length,))
    one = dataclasses.replace(rows, shapes=TokenShapes("static", row_length, row_length, divisor, 2), rows=1)

    def cut(chosen: np.ndarray, sizes: list[int]) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        tokens = [table.gather(chosen[i : i + 1])[:size] for i, size in enumerate(sizes)]
        masks = [table.gather_supervised(chosen[i : i + 1]) for i in range(len(sizes))]
        if any(mask is None for mask in masks):
            return tokens, None
        return tokens, [mask[:size] for mask, size in zip(masks, sizes, strict=True) if mask is not None]

    growing = [max(2, min(int(length), 2 + 7 * (i + 1))) for i, length in enumerate(lengths[several])]
    yield Batch(LENGTHS_OFF, *cut(several, [fixed]), one), several[:1]
    yield Batch("rows of one length, each a segment", *cut(several, [fixed] * several.size), rows), several
    yield Batch("one sample of a fixed length", *cut(several, [fixed]), layout), several[:1]
    yield Batch("samples of one length", *cut(several, [fixed] * several.size), layout), several
    yield Batch("samples of different lengths", *cut(several, growing), layout), several
    for index, part in enumerate(parts):
        yield Batch(f"micro-batch {index} of the step", *cut(part, lengths[part].tolist()), layout), part


def _compare(
    workload: Workload, batch: Batch, weights: Mapping[str, np.ndarray], ours: AttentionPath, padded: AttentionPath
) -> tuple[str | None, Outcome, Outcome]:
    """Return the first stage that differs on a batch (None if none does), and the numbers of both layouts."""
    found = _run(workload, batch, batch.layout, weights, ours)
    expected = _run(workload, batch, _dense_layout(batch, workload.recipe.shapes.divisor), weights, padded)
    if not abs(found.loss - expected.loss) <= LOSS_TOLERANCE:
        return "forward", found, expected
    if _first_tensor(found, expected) is not None:
        return "forward", found, expected
    difference, name = gradient_difference(found.gradients, expected.gradients)
    return (f"backward ({name})" if difference > GRADIENT_TOLERANCE else None), found, expected


def _dense_layout(batch: Batch, divisor: int) -> Layout:
    rows, row_length = len(batch.samples), round_up(max(sample.size for sample in batch.samples), divisor)
    shapes = TokenShapes("static", rows * row_length, rows * row_length, divisor, rows)
    return Layout(Mode.PADDED, shapes, row_length, rows=rows, row_lengths=(row_length,))


def _run(
    workload: Workload, batch: Batch, layout: Layout, weights: Mapping[str, np.ndarray], path: AttentionPath
) -> Outcome:
    recorder = Recorder(path)
    recipe = workload.recipe
    net = CausalLM(workload.model_config, recipe.model.max_position_embeddings, recorder, seed=recipe.train.seed)
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(weights[parameter.name]))
    samples = ArraySamples(batch.samples, batch.supervised)
    columns = MicroBatches(samples, layout, workload.store.pad_id, path.columns).micro_batch(
        np.arange(len(batch.samples))
    )
    names = (*("input_ids", "labels", "position_ids"), *path.declared(workload.shapes))
    parameters = net.trainable_params()
    loss = CausalLMLoss(net)
    value, gradients = ms.value_and_grad(loss, None, parameters)(*(Tensor(columns[name]) for name in names))
    supervised = max(columns.supervised, 1)
    return Outcome(
        loss=float(value.asnumpy()) / supervised,
        gradients={p.name: g.asnumpy() for p, g in zip(parameters, gradients, strict=True)},
        layers=recorder.layers[: workload.model_config.num_hidden_layers],
        columns=columns,
        lens=layout.place(samples.lengths),
    )


def _first_tensor(found: Outcome, expected: Outcome) -> tuple[int, str, int] | None:
    """Return (layer, tensor, place of the sample in the batch) of the first difference; padding does not count."""
    lengths = expected.columns["seq_lens"]
    for layer in range(len(expected.layers)):
        for tensor in TENSORS:
            for place, length in enumerate(lengths):
                a, b = (_of_tensor(side, layer, tensor, place, int(length)) for side in (found, expected))
                if a.shape != b.shape or not np.abs(a - b).max() <= TENSOR_TOLERANCE * max(np.abs(b).max(), 1.0):
                    return layer, tensor, place
    return None


def _locate(batch: Batch, ids: np.ndarray, found: Outcome, expected: Outcome, stage: str) -> Bisection:
    """Return the sample, layer and tensor where a difference begins, with its code if the pattern is known."""
    first = _first_tensor(found, expected)
    lengths = [sample.size for sample in batch.samples]
    if first is None:
        place, tensor, code, detail = _name_loss_fault(found, expected, stage)
        return _where(batch, ids, place, None, tensor, lengths, code, detail)
    layer, tensor, place = first
    values = _of_tensor(found, layer, tensor, place, lengths[place])
    if not np.isfinite(values).all():
        code, detail = "LOSS-NAN", f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite"
    elif layer == 0 and tensor == "v":
        code, detail = _name_token_fault(place, found, expected)
    elif layer == 0 and tensor in ("q", "k"):
        code, detail = "POS-RESET", "the tokens agree, their positions do not"
    elif tensor == "attention output":
        ours = found.layers[layer]
        code, detail = name_attention_fault(
            ours["q"],
            ours["k"],
            ours["v"],
            ours["attention output"],
            found.lens.actual_seq_qlen,
            found.lens.starts,
            lengths,
        )
    else:
        code, detail = "LOSS-DIFFERS", f"{tensor} differs first in layer {layer}"
    if batch.rung == LENGTHS_OFF and tensor == "attention output" and not code.startswith("LEN"):
        detail += "; this batch does not depend on lengths: the attention itself is wrong"
    return _where(batch, ids, place, layer, tensor, lengths, code, detail)


def _of_tensor(outcome: Outcome, layer: int, tensor: str, place: int, length: int) -> np.ndarray:
    start = int(outcome.lens.starts[place])
    return outcome.layers[layer][tensor][start : start + length]


def _of_sample(outcome: Outcome, column: str, place: int, length: int) -> np.ndarray:
    start = int(outcome.lens.starts[place])
    return outcome.columns[column][start : start + length]


def _name_loss_fault(found: Outcome, expected: Outcome, stage: str) -> tuple[int | None, str, str, str]:
    """Return (place of the sample, tensor, code, words) if all layers agree: a label fault, or an unknown one."""
    outside = count_supervised(found.columns["labels"][~found.lens.real_mask])
    if outside:
        return None, "labels", "LABEL-PAD", f"{outside} targets lie in padding, which must have none"
    finding = next(iter(lint_batch(_lintable(found.columns))), None)
    for place, length in enumerate(expected.lens.seq_lens.tolist()):
        ours, theirs, ids = (
            _of_sample(side, column, place, length)
            for side, column in ((found, "labels"), (expected, "labels"), (expected, "input_ids"))
        )
        if not np.array_equal(ours, theirs):
            return place, "labels", *_name_label_fault(ours, theirs, ids, finding)
    tensor = "loss" if stage == "forward" else "gradient"
    if finding:
        return None, tensor, finding.code, finding.text
    if stage == "forward":
        code = "LOSS-DIFFERS" if np.isfinite(found.loss) else "LOSS-NAN"
        return (
            None,
            tensor,
            code,
            f"all layers agree, the loss ({found.loss:.6g}, must be {expected.loss:.6g}) does not",
        )
    name = stage.removeprefix("backward (").removesuffix(")")
    bad = int((~np.isfinite(found.gradients[name])).sum())
    if bad:
        return None, tensor, "LOSS-NAN", f"all layers agree, {bad} values of the gradient of {name} are not finite"
    return None, tensor, "LOSS-DIFFERS", f"all layers agree, the gradient does not, most of all that of {name}"


def _name_label_fault(
    ours: np.ndarray, theirs: np.ndarray, ids: np.ndarray, finding: Finding | None
) -> tuple[str, str]:
    """Return (code, words) for a sample with wrong labels."""
    i = int(np.argmax(ours != theirs))
    says = "no target" if ours[i] == IGNORE_INDEX else f"target {ours[i]}"
    must = "none" if theirs[i] == IGNORE_INDEX else f"{theirs[i]}"
    differ = int((ours != theirs).sum())
    detail = f"token {i} of the sample has {says}, must have {must} ({differ} of {ours.size} differ)"
    targets = ours != IGNORE_INDEX
    if targets.any() and np.array_equal(ours[targets], ids[targets]):
        return "LABEL-SHIFT", f"{detail}; each target is the token itself: labels were not shifted"
    # A lost target looks like a masked prompt, so the linter cannot find it.
    return (finding.code, f"{detail}; {finding.text}") if finding else ("LABEL-WRONG", detail)


def _name_token_fault(place: int, found: Outcome, expected: Outcome) -> tuple[str, str]:
    """Return (code, words) for a sample whose values differ in layer 0: other tokens, or another embedding."""
    lengths = expected.lens.seq_lens.tolist()
    ours, theirs = (_of_sample(side, "input_ids", place, lengths[place]) for side in (found, expected))
    if np.array_equal(ours, theirs):
        return "LOSS-DIFFERS", "the tokens agree, but the values computed from them before the attention differ"
    one_after_another = np.concatenate(
        [_of_sample(expected, "input_ids", other, length) for other, length in enumerate(lengths)]
    )
    padded = np.concatenate([one_after_another, np.full(ours.size - 1, -1)])
    agree = (np.lib.stride_tricks.sliding_window_view(padded, ours.size) == ours).mean(1)
    own, best = float((ours == theirs).mean()), int(np.argmax(agree))
    if agree[best] > max(own, 0.5):
        of = int(np.searchsorted(np.cumsum(lengths), best, side="right"))
        shift = best - sum(lengths[:of])
        return "LEN-ORDER", (
            f"its tokens are those of the sample at place {of} of the batch from its token {shift} on: lengths or rows "
            "are in another order"
        )
    i = int(np.argmax(ours != theirs))
    return "DATA-TOKENS", (
        f"token {i} of the sample must be id {theirs[i]}, got {ours[i]} ({int((ours != theirs).sum())} of {ours.size} "
        "differ); take the ids from the store unchanged"
    )


def _lintable(columns: MicroBatch) -> Columns:
    return {name: columns[name] for name in COLUMNS if name in columns}


def _where(
    batch: Batch,
    ids: np.ndarray,
    place: int | None,
    layer: int | None,
    tensor: str,
    lengths: list[int],
    code: str,
    detail: str,
) -> Bisection:
    sample = None if place is None else int(ids[place])
    around = lengths if place is None else lengths[max(place - 2, 0) : place + 3]
    at = "" if place is None else f", sample {sample} ({lengths[place]} tokens, lengths around it {around})"
    in_layer = "" if layer is None else f", layer {layer}"
    return Bisection(
        rung=batch.rung,
        sample=sample,
        length=None if place is None else lengths[place],
        lengths=around,
        layer=layer,
        tensor=tensor,
        code=code,
        text=f"{batch.rung}{at}{in_layer}, {tensor}: {detail}",
    )
