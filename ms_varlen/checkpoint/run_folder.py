"""The folder that a run writes to, and the checkpoint that it resumes from.

`<output_dir>/<mode>` is the first run of a mode, `<output_dir>/<mode>-2` the second, and so on; nothing is overwritten.

`checkpoint.resume` decides:

- `auto`: the run with the highest number resumes at its newest checkpoint, or at step 0 when it was killed before its
  first one; without a run, the first begins;
- `never`: a run begins at step 0, in a new numbered folder when there are runs already;
- a folder `step_NNNNNNNN`: resumes exactly this checkpoint: in its own run folder if it is the newest there and the
  folder is one of this `output_dir` and mode; else in a new numbered folder that begins with it (hard links, or copies
  on another disk) and with the metrics up to its step. So newer checkpoints and other folders stay as they are.

`ms_varlen.checkpoint.resume` decides whether a run may resume. One process at a time writes a run folder: an flock
on its `.lock`, which the system releases when the process ends, however it ends (a
child that was forked without exec shares it). With several ranks, one of them opens the run and the others follow.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml

from ms_varlen.checkpoint.config import CheckpointConfig
from ms_varlen.checkpoint.resume import RECIPE_FILE, Expected, Shapes, load_to_go_on
from ms_varlen.checkpoint.store import Checkpoint, list_checkpoints, load_checkpoint, remove_leftovers
from ms_varlen.errors import CheckpointError
from ms_varlen.files import fsync, hidden, locked, publish, try_lock, write_atomically

logger = logging.getLogger("ms_varlen")

METRICS_FILE = "metrics.jsonl"
LOCK_FILE = ".lock"


@dataclass
class Run:
    """A run folder that this process may write to, until `close`; without a lock, only read from.

    `checkpoint` holds all arrays of the run so far: set it to None once they are loaded, and their memory is free.
    `replanned` names the keys that differ from the checkpoint's recipe and decide the plan, as `same_recipe` does.
    """

    folder: Path
    checkpoint: Checkpoint | None
    lock: IO[bytes] | None
    replanned: list[str] = field(default_factory=list)

    @property
    def metrics_path(self) -> Path:
        """The run's `metrics.jsonl`, cut back to the checkpoint's step."""
        return self.folder / METRICS_FILE

    def close(self) -> None:
        """Let other processes write to the folder."""
        if self.lock is not None:
            self.lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_folders(output_dir: Path, mode: str) -> list[Path]:
    """Folders of the runs of a mode, in the order they were begun."""
    if not output_dir.is_dir():
        return []
    name = re.compile(rf"{re.escape(mode)}(?:-(\d+))?")
    found = [(name.fullmatch(path.name), path) for path in output_dir.iterdir() if path.is_dir()]
    return [path for _, path in sorted((int(match[1] or 1), path) for match, path in found if match)]


def open_run(
    config: CheckpointConfig,
    mode: str,
    resolved_recipe: Mapping[str, Any],
    expected_shapes: Shapes | None = None,
    data_fingerprint: str | None = None,
) -> Run:
    """The folder to write to, locked, and the checkpoint to resume from, loaded and verified.

    Args:
        config: the `checkpoint` section.
        mode: the recipe's mode.
        resolved_recipe: the whole recipe as plain values (`model_dump(mode="json")`); `train.steps` is read.
        expected_shapes: the model's parameters, name -> shape; None takes the checkpoint's.
        data_fingerprint: of the token store in use; None takes the checkpoint's.
    Raises:
        CheckpointError: another process writes there, a recipe key changed, the checkpoint is corrupt, of another mode,
            of another model or of other data, or is beyond `train.steps`. Nothing was changed then, leftovers of a kill
            apart.
    """
    # As it will be read back, so that a tuple of the caller is no change.
    recipe = yaml.safe_load(yaml.safe_dump(dict(resolved_recipe)))
    expected = (expected_shapes, data_fingerprint)
    with _opening(config.output_dir):
        runs = run_folders(config.output_dir, mode)
        if isinstance(config.resume, Path):
            step = config.resume.resolve()  # a link may have any name
            home = step.parent
            newest = [path.name for path in list_checkpoints(home)[-1:]]
            if home in [folder.resolve() for folder in runs] and newest == [step.name]:
                return _go_on(home, mode, recipe, expected)
            checkpoint, replanned = load_to_go_on(step, mode, recipe, expected)
            return _begin(_next_folder(config.output_dir, mode, runs), recipe, checkpoint, replanned)
        if config.resume == "auto" and runs:
            return _go_on(runs[-1], mode, recipe, expected)
        return _begin(_next_folder(config.output_dir, mode, runs), recipe, None, [])


def follow_run(folder: Path, checkpoint: Path | None, replanned: list[str], mode: str, expected_shapes: Shapes) -> Run:
    """The run that another rank opened, to read from: the checkpoint is loaded and verified here too.

    Args:
        folder, checkpoint, replanned: of the other rank's `Run`.
        mode, expected_shapes: see `open_run`.
    Raises:
        CheckpointError: the checkpoint cannot be read here.
    """
    if checkpoint is not None and not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} must be on a disk that all nodes share, and is not to be seen from this one; set "
            "checkpoint.output_dir to a shared folder"
        )
    loaded = load_checkpoint(checkpoint, mode, expected_shapes) if checkpoint is not None else None
    return Run(folder, loaded, None, replanned)


def cut_metrics(path: Path, step: int) -> None:
    """Cut a metrics file back to `lines_up_to` a step, at once or not at all."""
    if path.exists():
        write_atomically(path, lines_up_to(path, step))


def lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """The lines of a metrics file for steps <= `step`; a half-written last line is left out.

    Raises:
        CheckpointError: a line before the last is no metrics line.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number, line in enumerate(file, start=1):
            try:
                keep = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError) as error:
                if file.tell() == size:
                    return
                raise CheckpointError(
                    f"{path} line {number} must be an object with a step, found {line[:60]!r}; "
                    "remove the line, or start from scratch with checkpoint.resume=never"
                ) from error
            if keep:
                yield line if line.endswith(b"\n") else line + b"\n"


def make_output_dir(output_dir: Path) -> None:
    """Make the folder that runs and pages are written to.

    Raises:
        CheckpointError: it cannot be made or written.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.output_dir must be a folder that can be made, got {output_dir} ({error.strerror}); "
            "choose another"
        ) from error


@contextlib.contextmanager
def _opening(output_dir: Path) -> Iterator[None]:
    """Only one process at a time chooses and makes run folders; held for the time of `open_run`."""
    make_output_dir(output_dir)
    with locked(output_dir / LOCK_FILE):
        remove_leftovers(output_dir)
        yield


def _lock(folder: Path) -> IO[bytes]:
    lock = (folder / LOCK_FILE).open("a+b")
    if not try_lock(lock.fileno()):
        lock.seek(0)
        holder = lock.read().decode() or "unknown"
        lock.close()
        raise CheckpointError(
            f"{folder} must be written by one process at a time, the process with pid {holder} holds it; "
            "wait for it, or begin another run with checkpoint.resume=never",
            "CKPT-LOCKED",
        )
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock


def _next_folder(output_dir: Path, mode: str, runs: list[Path]) -> Path:
    if not runs:
        return output_dir / mode
    return output_dir / f"{mode}-{int(runs[-1].name.removeprefix(mode).removeprefix('-') or 1) + 1}"


def _begin(folder: Path, recipe: dict[str, Any], checkpoint: Checkpoint | None, replanned: list[str]) -> Run:
    """A new run folder, at step 0 or with a checkpoint of elsewhere in it; a kill leaves all of it or nothing."""
    temporary = hidden(folder)
    temporary.mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        lock = stack.enter_context(_lock(temporary))
        if checkpoint is not None:
            _link_folder(checkpoint.path, temporary / checkpoint.path.name)
            source = checkpoint.path.parent / METRICS_FILE
            if source.exists():
                write_atomically(temporary / METRICS_FILE, lines_up_to(source, checkpoint.step))
        _write_recipe(temporary, recipe)
        publish(temporary, folder)
        stack.pop_all()
    logger.info("%s begins at step %d", folder, checkpoint.step if checkpoint else 0)
    return Run(folder, checkpoint, lock, replanned)


def _link_folder(source: Path, target: Path) -> None:
    """The same files in another folder: hard links, which need no room, or copies where the disk is another one."""
    target.mkdir()
    for file in source.iterdir():
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copy(file, target / file.name)
            fsync(target / file.name)
    fsync(target)


def _go_on(folder: Path, mode: str, recipe: dict[str, Any], expected: Expected) -> Run:
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_lock(folder))
        remove_leftovers(folder)
        checkpoints = list_checkpoints(folder)
        checkpoint, replanned = None, list[str]()
        if checkpoints:
            checkpoint, replanned = load_to_go_on(checkpoints[-1], mode, recipe, expected)
            cut_metrics(folder / METRICS_FILE, checkpoint.step)
        else:
            (folder / METRICS_FILE).unlink(missing_ok=True)
        _write_recipe(folder, recipe)
        stack.pop_all()
    logger.info("%s goes on at step %d", folder, checkpoint.step if checkpoint else 0)
    return Run(folder, checkpoint, lock, replanned)


def _write_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    write_atomically(folder / RECIPE_FILE, [text.encode()])
