"""One error class per kind of fault a caller can act on; each is a `ValueError` too.

A message says, in this order: the name, the rule, the value found, where, and the next step. For example
``seq_lens[17] must be <= token_budget (4096), got 5210; raise batch.token_budget or set data.overlong=split``.
"""

import contextlib
from collections.abc import Iterator


class VarlenError(ValueError):
    """Base of every error that a caller can fix.

    Args:
        message: in the form above.
        code: the fault's entry in `ms_varlen.catalogue`; by default the one of the class.
    """

    default_code: str | None = None

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.code = code or self.default_code


class RecipeError(VarlenError):
    """A recipe that cannot be run.

    Args:
        faults: one line per fault, each starting with its YAML path.
        where: the recipe file or a word for where it came from.
    """

    def __init__(self, faults: list[str], where: str = "recipe", code: str | None = "RECIPE"):
        self.faults = list(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n".join([f"{where}: {count}", *(f"  {fault}" for fault in self.faults)]), code)


class LengthsError(VarlenError):
    """Sequence lengths that do not describe the batch they came with."""


class ShapesError(VarlenError):
    """A size that the declared shapes do not allow."""

    default_code = "SHAPE-RANGE"


class DataError(VarlenError):
    """A source, a sample or a token store that cannot be used."""

    default_code = "DATA-SOURCE"


@contextlib.contextmanager
def located(where: object) -> Iterator[None]:
    """Add the place to a DataError raised inside, before the next step of its message.

    Functions that look at one record or text do not know where it comes from; the loop that knows uses this.
    The next step follows the last semicolon, and holds none itself.
    """
    try:
        yield
    except DataError as error:
        fault, semicolon, step = str(error).rpartition("; ")
        error.args = (f"{fault}, in {where}; {step}" if semicolon else f"{step}, in {where}",)
        raise


class CheckpointError(VarlenError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class RanksError(VarlenError):
    """Ranks of one run that disagree, or one of them died."""

    default_code = "RANK-DIFFERS"
