"""Whether a checkpoint's place in a plan means the samples that are there now. Imports no MindSpore.

A plan numbers samples by their lengths alone, so other texts, another loss mask or another tokenizer of equal lengths
would train on without a word. The fingerprint of the token store, which hashes all that decides its content, tells
them apart; folders and paths are no part of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ms_varlen.errors import CheckpointError

DATA_FINGERPRINT = "data_fingerprint"
"""The manifest's key."""

SHOWN = 12
"""Characters of a fingerprint that a message shows."""


def check_data(path: Path, written: Mapping[str, Any], fingerprint: str, advice: str | None = None) -> None:
    """Refuse to go on with other data than what was trained on so far.

    Args:
        path: of the checkpoint or the file that says what it was.
        written: what was written down about it.
        fingerprint: of the token store in use.
        advice: what to do instead of bringing the data back; by default for one of our checkpoints.
    Raises:
        CheckpointError: another token store, or nothing tells which it was.
    """
    found = written.get(DATA_FINGERPRINT)
    if found == fingerprint:
        return
    was = f"token store {found[:SHOWN]}" if isinstance(found, str) else "a token store that it does not name"
    advice = advice or f"begin anew from its weights with checkpoint.resume=never and model.init_from={path}"
    raise CheckpointError(
        f"data.source and data.tokenizer must give the samples of {path} ({was}), got token store "
        f"{fingerprint[:SHOWN]}: texts, loss masks or the tokenizer changed, so its place in the epoch means other "
        f"samples; bring the data back as it was, or {advice}",
        "CKPT-RECIPE",
    )
