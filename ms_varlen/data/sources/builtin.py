"""Sources that need no file: the standard library's docstrings, and made-up text of lognormal lengths."""

import ast
import collections
import dataclasses
import hashlib
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ms_varlen.data.config import PYDOC, LognormalLengths
from ms_varlen.data.sources.record_batches import Batch, RecordBatch, in_batches

# Third-party code, and folders whose docstrings are test data rather than prose.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
NORMAL_P99 = 2.3263478740408408
"""What a standard normal number exceeds once in a hundred times."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Pydoc:
    """The distinct docstrings of modules, classes and functions below a folder, by default the standard library.

    Files come in the order of their paths, docstrings within a file breadth first. Files that Python cannot parse are
    counted in ``skipped["unparsed_files"]`` of the last batch. Reading it all takes about 4 s.
    """

    name = PYDOC

    def __init__(self, folder: Path | None = None):
        self.folder = folder or Path(sysconfig.get_path("stdlib"))

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        found = []
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in NOT_LIBRARY]
            found += [Path(folder, name) for name in files if name.endswith(".py")]
        return sorted(path for path in found if path.is_file())

    def fingerprint(self) -> str:
        """Hash of the Python version (it decides how docstrings are parsed) and of every file's path and content."""
        digest = hashlib.blake2b(platform.python_version().encode(), digest_size=16)
        for path in self.files:
            content = path.read_bytes()
            digest.update(f"\0{path.relative_to(self.folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    def batches(self) -> Iterator[Batch]:
        """The docstrings as `text`; the last batch has none, and tells what was passed over."""
        skipped: collections.Counter[str] = collections.Counter()
        yield from in_batches(self._found(skipped))
        yield RecordBatch([], 1.0, skipped)

    def _found(self, skipped: collections.Counter[str]) -> Iterator[tuple[dict[str, Any], str, int, float]]:
        seen: set[bytes] = set()
        files = self.files
        for number, path in enumerate(files, 1):
            where = path.relative_to(self.folder).as_posix()
            for text in _docstrings(path, skipped):
                key = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield {"text": text}, where, len(text), number / len(files)


def _docstrings(path: Path, skipped: collections.Counter[str]) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # else a filter of the caller's could turn an old escape into an error
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        skipped["unparsed_files"] += 1
        return
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text and _encodable(text):
            yield text
        elif text:
            skipped["unencodable_docstrings"] += 1


def _encodable(text: str) -> bool:
    """False for a text with half a surrogate pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Lognormal:
    """Random lower-case words; the bytes of a document and its end-of-text are as many as a lognormal number says.

    The same settings give the same texts. For measuring, not for learning: 20,000 documents take 0.3 s.
    """

    name = "lognormal"

    def __init__(self, lengths: LognormalLengths):
        self.lengths = lengths
        self.files: list[Path] = []

    def fingerprint(self) -> str:
        """Hash of the settings, and of NumPy's version, whose generators may change."""
        text = json.dumps([dataclasses.asdict(self.lengths), np.__version__], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def batches(self) -> Iterator[Batch]:
        """The documents as `text`."""
        return in_batches(self._found())

    def _found(self) -> Iterator[tuple[dict[str, Any], str, int, float]]:
        settings = self.lengths
        sigma = np.log(settings.p99 / settings.median) / NORMAL_P99
        random = np.random.default_rng(settings.seed)
        drawn = random.lognormal(np.log(settings.median), sigma, settings.samples)
        for number, tokens in enumerate(np.maximum(np.rint(drawn), 2).astype(np.int64).tolist(), 1):
            yield {"text": _words(random, tokens - 1)}, f"document {number}", tokens, number / settings.samples


def _words(random: np.random.Generator, size: int) -> str:
    """`size` letters and spaces, words of 2 to 9 letters; it neither begins nor ends with a space."""
    letters = random.integers(ord("a"), ord("z") + 1, size, np.uint8)
    spaces = np.cumsum(random.integers(3, 11, size // 3)) - 1
    letters[spaces[spaces < size - 1]] = ord(" ")
    return letters.tobytes().decode()
