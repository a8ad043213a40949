"""Streams of documents: the standard library's docstrings, JSON lines, or made-up text of lognormal lengths.

A source is iterated as often as needed, in the same order each time, and holds one document at a time. Its
`fingerprint` is a hash of every byte that it reads, not of times or sizes: a store is never reused for text that
changed. That costs one read of the source at every start (about 2 s per GB; 0.06 s for `pydoc`).
"""

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
from typing import Protocol

import numpy as np

from ms_varlen.data.config import PYDOC, LognormalLengths, is_lognormal
from ms_varlen.errors import DataError

# Third-party code, and folders whose docstrings are test data rather than prose.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
NORMAL_P99 = 2.3263478740408408
"""What a standard normal number exceeds once in a hundred times."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and where it was found.

    Attributes:
        text: the text; it can be encoded as UTF-8.
        where: the place for an error message, e.g. ``corpus.jsonl line 3``.
        done: share of the source that was read so far, 0 to 1.
    """

    text: str
    where: str
    done: float


class Source(Protocol):
    """What the token store needs of a source.

    Attributes:
        name: for people; not part of the identity.
        skipped: how much was passed over, by reason, after an iteration.
    """

    name: str
    skipped: collections.Counter[str]

    def __iter__(self) -> Iterator[Document]: ...

    def fingerprint(self) -> str:
        """A hash of the source's content; equal fingerprints mean equal documents."""
        ...


def _encodable(text: str) -> bool:
    """False for a text with half a surrogate pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class PydocSource:
    """The distinct docstrings of modules, classes and functions below a folder, by default the standard library.

    Files come in the order of their paths, docstrings within a file breadth first. A file that Python cannot parse is
    counted in ``skipped["unparsed_files"]``. Reading it all takes about 4 s.
    """

    name = PYDOC

    def __init__(self, folder: Path | None = None):
        self.folder = folder or Path(sysconfig.get_path("stdlib"))
        self.skipped: collections.Counter[str] = collections.Counter()

    def _files(self) -> list[Path]:
        found = []
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in NOT_LIBRARY]
            found += [Path(folder, name) for name in files if name.endswith(".py")]
        return sorted(path for path in found if path.is_file())

    def fingerprint(self) -> str:
        """Hash of the Python version (it decides how docstrings are parsed) and of every file's path and content."""
        digest = hashlib.blake2b(platform.python_version().encode(), digest_size=16)
        for path in self._files():
            content = path.read_bytes()
            digest.update(f"\0{path.relative_to(self.folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        seen: set[bytes] = set()
        files = self._files()
        for number, path in enumerate(files, 1):
            where = path.relative_to(self.folder).as_posix()
            for text in self._docstrings(path):
                key = hashlib.blake2b(text.encode(), digest_size=16).digest()
                if key not in seen:
                    seen.add(key)
                    yield Document(text, where, number / len(files))

    def _docstrings(self, path: Path) -> Iterator[str]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # else a filter of the caller's could turn an old escape into an error
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            self.skipped["unparsed_files"] += 1
            return
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and _encodable(text):
                yield text
            elif text:
                self.skipped["unencodable_docstrings"] += 1


class JsonLinesSource:
    """The `text` of each line of a JSON lines file; blank lines are counted in ``skipped["blank_lines"]``.

    Raises:
        DataError: while iterating, at the first line that is not UTF-8, not a JSON object, or has no string `text`.
    """

    def __init__(self, path: Path):
        if not path.is_file() or not os.access(path, os.R_OK):
            raise DataError(f"data.source must be an existing, readable file, got {path}; correct the path")
        self.path = path
        self.name = path.name
        self.skipped: collections.Counter[str] = collections.Counter()

    def fingerprint(self) -> str:
        """Hash of the file's content; neither its name nor its times count."""
        digest = hashlib.blake2b(digest_size=16)
        with self.path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    def __iter__(self) -> Iterator[Document]:
        self.skipped.clear()
        size = max(self.path.stat().st_size, 1)
        read = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                read += len(line)
                where = f"{self.path} line {number}"
                if not line.strip():
                    self.skipped["blank_lines"] += 1
                    continue
                # Editors on Windows put a byte order mark at the start of a file.
                text = _text_of(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
                yield Document(text, where, min(read / size, 1.0))


def _text_of(line: bytes, where: str) -> str:
    """The `text` of one JSON line, or a DataError that says what is wrong with it."""
    try:
        entry = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(
            f"a line must be UTF-8, got byte 0x{line[error.start]:02x} at byte {error.start}, in {where}; "
            "save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"a line must be a JSON object, got {error}, in {where}; mend or remove the line") from error
    if not isinstance(entry, dict):
        raise DataError(
            f"a line must be a JSON object, got {type(entry).__name__}, in {where}; mend or remove the line"
        )
    if "text" not in entry:
        fields = ", ".join(list(entry)[:8]) or "no field"
        raise DataError(f"field 'text' must be there, got {fields}, in {where}; rename the field that holds the text")
    text = entry["text"]
    if not isinstance(text, str):
        raise DataError(
            f"field 'text' must be a string, got {type(text).__name__}, in {where}; mend or remove the line"
        )
    if not _encodable(text):
        raise DataError(
            f"field 'text' must be Unicode text, got half a surrogate pair, in {where}; mend the \\u escapes"
        )
    return text


class LognormalSource:
    """Random lower-case words; the bytes of a document and its end-of-text are as many as a lognormal number says.

    The same settings give the same texts. For measuring, not for learning: 20,000 documents take 0.3 s.
    """

    def __init__(self, lengths: LognormalLengths):
        self.lengths = lengths
        self.name = "lognormal"
        self.skipped: collections.Counter[str] = collections.Counter()

    def fingerprint(self) -> str:
        """Hash of the settings, and of NumPy's version, whose generators may change."""
        text = json.dumps([dataclasses.asdict(self.lengths), np.__version__], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __iter__(self) -> Iterator[Document]:
        settings = self.lengths
        sigma = np.log(settings.p99 / settings.median) / NORMAL_P99
        random = np.random.default_rng(settings.seed)
        drawn = random.lognormal(np.log(settings.median), sigma, settings.samples)
        for number, tokens in enumerate(np.maximum(np.rint(drawn), 2).astype(np.int64), 1):
            yield Document(_words(random, int(tokens) - 1), f"document {number}", number / settings.samples)


def _words(random: np.random.Generator, size: int) -> str:
    """`size` letters and spaces, words of 2 to 9 letters; it neither begins nor ends with a space."""
    letters = random.integers(ord("a"), ord("z") + 1, size, np.uint8)
    spaces = np.cumsum(random.integers(3, 11, size // 3)) - 1
    letters[spaces[spaces < size - 1]] = ord(" ")
    return letters.tobytes().decode()


def open_source(source: str) -> Source:
    """The source that `data.source` names: `pydoc`, the path of a .jsonl file, or `lognormal(...)`."""
    if is_lognormal(source):
        return LognormalSource(LognormalLengths.parse(source))
    return PydocSource() if source == PYDOC else JsonLinesSource(Path(source).expanduser())
