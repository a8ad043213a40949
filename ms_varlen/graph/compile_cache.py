"""MindSpore's compile cache, made safe: an entry is used only by a run that would compile the very same graphs.

By itself MindSpore matches cached graphs by the order of compilation and a hash of the start script: another hidden
size crashes, other shapes are silently wrong. Here each entry is a folder of its own, named by a fingerprint::

    <root>/<fingerprint>/complete.sha256           names and hashes of the files below, written last
    <root>/<fingerprint>/rank_0/graph_cache/...    MindSpore's
    <root>/<fingerprint>.tmp-x7a2.../...           being made; renamed when every graph is there

A kill leaves a `.tmp-` folder, which no run reads. Runs side by side each make their own, and the first to finish is
kept. So do the ranks of a run: they share an entry, whichever of them made it. MindSpore looks for a rank's graphs in a
folder with its number, so the others get `rank_0` under theirs; graphs that rank 0 had made, with `AllReduce` in them,
gave rank 1 the same bits as its own (MindSpore 2.9, CPU). Entries hold graphs with their constants, not the weights.
Tiny cells compile in 0.3 s instead of 0.8 s, a 4-layer model in 0.4 s instead of 3.7 s.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ms_varlen
from ms_varlen.errors import RecipeError
from ms_varlen.files import user_cache

logger = logging.getLogger("ms_varlen")

MARKER = "complete.sha256"
KEPT_ENTRIES = 64
STALE_SECONDS = 24 * 3600
_ENABLE, _PATH, _TRUST = "MS_COMPILER_CACHE_ENABLE", "MS_COMPILER_CACHE_PATH", "MS_DEV_FORCE_USE_COMPILE_CACHE"

_process_used_it = False  # MindSpore fixes the folder, and numbers the graphs on, for the whole process


@dataclasses.dataclass(frozen=True)
class CacheUse:
    """What became of the cache in this run.

    Attributes:
        state: "warm" (graphs are loaded), "cold" (compiled and kept) or "off".
        folder: the entry; None when off.
        reason: why it is off, or what warm and cold mean, for people.
    """

    state: Literal["warm", "cold", "off"]
    folder: Path | None
    reason: str


def fingerprint(parts: Mapping[str, Any], kernel_library: Path | None = None) -> str:
    """The name of the entry for these graphs: 64 hex digits.

    Beside the arguments it covers the versions of MindSpore, NumPy and Python, the source of ms_varlen, the platform
    and the number of ranks. Code outside ms_varlen that takes part in a graph must be named in `parts` by its own hash,
    and the rank itself where a graph holds its number.

    Args:
        parts: whatever decides the graphs, as JSON values: the resolved recipe, the roles and shapes in the order in
            which they are compiled. An entry holds the graphs' constants, so numbers that end up there belong here.
        kernel_library: a library whose operators the graphs call; its path is kept in the entry, so it counts as well.
    """
    library = None
    if kernel_library is not None:
        library = [str(kernel_library.resolve()), hashlib.sha256(kernel_library.read_bytes()).hexdigest()]
    everything = {
        "parts": parts,
        "kernel_library": library,
        "versions": [platform.python_version(), *map(importlib.metadata.version, ("mindspore", "numpy"))],
        "ms_varlen": _listing(Path(ms_varlen.__file__).parent),
        "platform": [platform.system(), platform.machine()],
        "ranks": os.environ.get("RANK_SIZE", "1"),
        "role": os.environ.get("MS_ROLE"),  # MindSpore puts it into the files' names
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def compile_cache(setting: str, name: str) -> Iterator[CacheUse]:
    """Compile every graph of the run inside this context, in one fixed order; a later graph is never cached.

    Args:
        setting: `graph.compile_cache` of the recipe: "auto", "off" or a folder.
        name: the `fingerprint`.
    Yields:
        what the cache does. Leaving without an exception keeps what was compiled.
    Raises:
        RecipeError: the folder cannot be written.
    """
    global _process_used_it
    reason = _why_off(setting)
    if reason is not None:
        logger.info("compile cache off: %s", reason)
        os.environ[_ENABLE] = "0"
        yield CacheUse("off", None, reason)
        return
    root = _root(setting)
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        warm = _is_whole(folder)
        if not warm and folder.exists():
            logger.warning(
                "[SHAPE-CACHE] %s does not hold what was kept there: it is removed, and compiled again", folder
            )
            _remove(folder)
        working = folder if warm else Path(tempfile.mkdtemp(prefix=f"{name}.tmp-", dir=root))
    except OSError as error:
        fault = f"graph.compile_cache: must be a folder that can be written, got {root} ({error.strerror})"
        raise RecipeError([f"{fault}; name another folder or set off"]) from error
    _process_used_it = True
    use = CacheUse("warm" if warm else "cold", folder, "graphs are " + ("loaded" if warm else "compiled and kept"))
    logger.info("compile cache %s: %s, %s", use.state, use.reason, folder)
    try:
        with _seen_by_rank(working) as seen, _mindspore_uses(seen, trust=warm):
            yield use
        if warm:
            _after_loading(folder)
        else:
            _publish(working, folder)
    finally:
        if not warm:
            shutil.rmtree(working, ignore_errors=True)


def _why_off(setting: str) -> str | None:
    if setting == "off":
        return "graph.compile_cache is off"
    if _process_used_it:
        return "this process has used it already, and MindSpore cannot change the folder"
    if os.environ.get(_ENABLE) == "1":
        logger.warning("%s=1 is set to 0: MindSpore's own matching loads wrong graphs; unset it to get ours", _ENABLE)
        return f"{_ENABLE}=1 was set in the environment"
    if not Path(sys.argv[0]).is_file():  # MindSpore opens it to hash its imports, and fails
        return f"MindSpore's cache needs a start script that is a file, got {sys.argv[0]!r}"
    return None


def _root(setting: str) -> Path:
    if setting != "auto":
        return Path(setting).expanduser().absolute()
    return user_cache("compile_cache")


@contextlib.contextmanager
def _seen_by_rank(folder: Path) -> Iterator[Path]:
    """The folder as MindSpore wants it in this rank: `rank_0`, which is for every rank, under the rank's number."""
    rank = os.environ.get("RANK_ID", "0")
    if rank == "0":
        yield folder
        return
    (folder / "rank_0").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=folder.parent) as view:
        (Path(view) / f"rank_{rank}").symlink_to(folder / "rank_0")
        yield Path(view)


@contextlib.contextmanager
def _mindspore_uses(folder: Path, trust: bool) -> Iterator[None]:
    """MindSpore reads these variables whenever it compiles, the path at the first graph only.

    Args:
        folder: where graphs are stored or loaded.
        trust: load without MindSpore's check of the start script, which is not what decides the graphs.
    """
    before = {name: os.environ.get(name) for name in (_PATH, _TRUST)}
    os.environ.update({_ENABLE: "1", _PATH: str(folder)})
    if trust:
        os.environ[_TRUST] = "1"
    try:
        yield
    finally:
        os.environ[_ENABLE] = "0"  # a graph compiled later must neither be stored under nor taken for another's number
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _listing(folder: Path) -> str:
    """One line per file below `folder`, sorted: its SHA-256 and its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    lines = (
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n"
        for path in files
        if "__pycache__" not in path.parts
    )
    return "".join(lines)


def _is_whole(folder: Path) -> bool:
    marker = folder / MARKER
    return marker.is_file() and marker.read_bytes() == _listing(folder).encode()


def _publish(working: Path, folder: Path) -> None:
    listing = _listing(working)
    if ".mindir" not in listing:
        logger.warning("compile cache: MindSpore stored no graph in %s, so nothing is kept", working)
        return
    try:
        (working / MARKER).write_text(listing)
        working.rename(folder)
    except OSError as error:
        if _is_whole(folder):
            logger.info("compile cache: another run has kept the same graphs meanwhile")
        else:
            logger.warning("compile cache: the graphs are not kept in %s (%s)", folder, error.strerror)


def _after_loading(folder: Path) -> None:
    if _is_whole(folder):
        (folder / MARKER).touch()
        return
    logger.warning("compile cache: more or other graphs were compiled than kept, so %s is removed", folder)
    _remove(folder)


def _remove(folder: Path) -> None:
    """Takes an entry away at once, whoever else tries the same."""
    if not folder.exists():
        return
    grave = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.rename(grave / "removed")
    shutil.rmtree(grave, ignore_errors=True)


def _sweep(root: Path) -> None:
    """Removes what killed runs left a day ago, and all but the entries used last."""
    for path in root.glob("*.tmp-*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    used: dict[Path, float] = {}
    for marker in root.glob(f"*/{MARKER}"):
        with contextlib.suppress(FileNotFoundError):
            used[marker.parent] = marker.stat().st_mtime
    for folder in sorted(used, key=used.__getitem__, reverse=True)[KEPT_ENTRIES:]:
        _remove(folder)
