"""The work of a planned epoch in tokens, FLOPs, seconds and memory: the measures that compare modes."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ms_varlen.errors import DataError
from ms_varlen.planning.cost import CostModel, DecoderSizes

WEIGHT_BYTES = 16
"""Bytes of a trained weight: the fp32 master, its gradient, and AdamW's two moments."""

GRADIENT_BYTES = 4
"""Bytes of a weight's fp32 gradient from one micro-batch."""

LOGIT_ARRAYS = 4
"""Arrays of [T, V] in fp32 that the plain token loss holds at its peak; see `ops.loss`."""


@dataclasses.dataclass(frozen=True)
class EpochWork:
    """An epoch of one way to lay out a corpus.

    Attributes:
        steps: optimizer steps.
        graphs: compiled in a run, all roles.
        real, computed: tokens of samples, and with padding.
        real_squared, computed_squared: sums of the squares of attention segments, of samples and with padding.
        largest: tokens of the largest micro-batch that the shapes allow.
    """

    steps: int
    graphs: int
    real: int
    computed: int
    real_squared: int
    computed_squared: int
    largest: int

    @property
    def token_share(self) -> float:
        """Real tokens as a share of those computed."""
        return self.real / self.computed

    def flop_share(self, cost: CostModel) -> float:
        """FLOPs of samples as a share of those computed."""
        real = cost.linear * self.real + cost.quadratic * self.real_squared
        return real / self.flops(cost)

    def flops(self, cost: CostModel) -> float:
        """FLOPs of the epoch, padding included."""
        return cost.linear * self.computed + cost.quadratic * self.computed_squared

    @property
    def tokens_per_step(self) -> float:
        """Real tokens of an optimizer step, over all ranks."""
        return self.real / self.steps

    def scaled(self, factor: float) -> "EpochWork":
        """The work of a corpus `factor` times as large, estimated from this part of it."""
        totals = ("steps", "real", "computed", "real_squared", "computed_squared")
        return dataclasses.replace(self, **{name: max(1, round(getattr(self, name) * factor)) for name in totals})

    def per_token(self, total: float) -> float:
        """A total of the epoch per real token, so that epochs of different lengths compare."""
        return total / self.real


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Times of a machine, fitted by a bench.

    Attributes:
        seconds_per_token, seconds_per_squared_token: of what is computed, padding included.
        seconds_per_step: of an optimizer step, whatever its size.
        seconds_per_compile: of a graph.
        relative_error: root mean square of the fit.
        machine: in words.
        parameters: of the model that was measured.
        body: of its operators: "kernel", "reference" or "ascend".
    """

    seconds_per_token: float
    seconds_per_squared_token: float
    seconds_per_step: float
    seconds_per_compile: float
    relative_error: float
    machine: str
    parameters: int
    body: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> "Calibration":
        """Read the calibration that a bench wrote.

        Args:
            values: the content of `calibration.json`.
            where: its path, for an error.
        Raises:
            DataError: another format, or a value missing.
        """
        words_of = ("machine", "body")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in words_of]
        missing = [name for name in names if not isinstance(values.get(name), int | float)]
        missing += [] if isinstance(values.get("body"), str) else ["body"]
        if values.get("format") != 1 or missing:
            found = f"format {values.get('format')}" + (f" without {', '.join(missing)}" if missing else "")
            raise DataError(
                f"a calibration must have format 1 and all its values, got {found}, in {where}; bench again"
            )
        machine = values.get("machine", {})
        words = [machine.get("processor"), f"{machine.get('cores')} cores", machine.get("system")]
        numbers = {name: values[name] for name in names}
        return cls(**numbers, machine=", ".join(str(word) for word in words if word), body=values["body"])

    def mismatch(self, parameters: int, bodies: Collection[str]) -> str | None:
        """Why the calibration does not apply to a recipe, in words; None if it applies.

        Args:
            parameters: number of weights of the recipe's model.
            bodies: bodies that its operators may have here.
        """
        if self.parameters != parameters:
            return f"it was measured on a model of {self.parameters:,} parameters, the recipe's has {parameters:,}"
        if self.body not in bodies:
            return f"it was measured with the {self.body} body of the operators, here it is {' or '.join(bodies)}"
        return None

    def seconds(self, work: EpochWork) -> float:
        """Seconds of an epoch, compiling apart."""
        of_tokens = self.seconds_per_token * work.computed + self.seconds_per_squared_token * work.computed_squared
        return of_tokens + self.seconds_per_step * work.steps


def memory_estimate(
    sizes: DecoderSizes, parameters: int, tokens: int, value_bytes: int, recompute: bool
) -> dict[str, float]:
    """Memory of a training step, in bytes: weights, and the forward values that the backward pass needs.

    A layer keeps its input, two norms' outputs and the sum after attention (4 H), queries and attention's output
    (2 N D), keys and values (2 K D), gate, up and their product (3 F); a recomputed one keeps its input alone, and one
    layer is whole at a time. The plain loss holds `LOGIT_ARRAYS` of [T, V] in fp32; the CPU kernel has no more than
    384 rows of them::

        weights     = 16 P
        gradients   = 4 P, a micro-batch's, before they are added to the step's
        casts       = bytes * P of fp32 weights that compute in bf16; recomputed, only the output's V H
        activations = bytes * T * layers * (4 H + 2 N D + 2 K D + 3 F)
        logits      = 4 * 4 * T * V

    Gradients of activations and other memory of MindSpore's pool are not counted, so this is a lower bound.

    Args:
        sizes: of the decoder, its `vocab_size` known.
        parameters: P, the number of weights.
        tokens: T of the largest micro-batch.
        value_bytes: of an activation: 4 for fp32, 2 for bf16.
        recompute: whether layers are computed again in the backward pass.
    """
    assert sizes.vocab_size is not None, "DecoderConfig.with_vocab_size comes first"
    heads = 2 * sizes.head_dim * (sizes.num_attention_heads + sizes.num_key_value_heads)
    layer = 4 * sizes.hidden_size + heads + 3 * sizes.intermediate_size
    kept = sizes.num_hidden_layers * (sizes.hidden_size if recompute else layer) + recompute * layer
    cast = sizes.vocab_size * sizes.hidden_size if recompute else parameters
    parts = {
        "weights": WEIGHT_BYTES * parameters,
        "gradients": GRADIENT_BYTES * parameters,
        "casts": value_bytes * cast if value_bytes < GRADIENT_BYTES else 0,
        "activations": value_bytes * tokens * kept,
        "logits": 4 * LOGIT_ARRAYS * tokens * sizes.vocab_size,
    }
    return {**{name: float(value) for name, value in parts.items()}, "total": float(sum(parts.values()))}
