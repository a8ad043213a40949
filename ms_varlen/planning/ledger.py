"""The ledger of an epoch: where each of its tokens went."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class EpochLedger:
    """Partition of a corpus during one epoch, in tokens (or in samples, with the same names).

    ``total == trained + skipped + pending + left_over + held_out + cut + dropped``

    Attributes:
        total: everything in the source.
        trained: in steps that were applied.
        skipped: in steps that held a NaN or an infinity.
        pending: planned for this epoch and not reached yet.
        left_over: the epoch's end that does not fill a step.
        held_out: kept for evaluation.
        cut: cut off overlong documents.
        dropped: removed by cleaning, in tokens of whole documents; in samples, each such document is one.
    """

    total: int
    trained: int
    skipped: int
    pending: int
    left_over: int
    held_out: int
    cut: int
    dropped: int

    @property
    def balanced(self) -> bool:
        """True when the parts add up to the total."""
        return self.total == sum(dataclasses.astuple(self)[1:])

    def to_dict(self) -> dict:
        """The parts, and `balanced`."""
        return {**dataclasses.asdict(self), "balanced": self.balanced}
