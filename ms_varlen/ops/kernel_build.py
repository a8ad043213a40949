"""The CPU kernels as a shared library: compiled from `csrc/` by the system's compiler on first use, then found again.

The library lies in `$XDG_CACHE_HOME` (or `~/.cache`) under `ms_varlen/kernels/<key>/`, where the key covers sources,
compiler, flags and processor: a folder shared by different machines never serves one the code of another. However many
processes start at once, one compiles and the others wait for it. Without a compiler that works there is no library,
which is logged once, and callers use their plain reference. Compiling takes about 6 s; finding it again milliseconds.

The sources name no processor's instructions. They ran on x86-64 with AVX-512, AVX2 and SSE2 (GCC 11 and 12, Clang 22),
and on aarch64 under emulation only.
"""

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from ms_varlen.files import locked, user_cache

logger = logging.getLogger("ms_varlen")

SOURCE_DIR = Path(__file__).parent / "csrc"
LIBRARY_NAME = "libms_varlen_kernels.so"
COMPILERS = ("g++", "clang++")
# No -ffast-math: it would hide NaN from the training step, and at link time turn off denormals in the whole process.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",  # else a square root keeps a loop from being vectorised
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wno-return-type-c-linkage",
)
COMPILE_SECONDS = 600


class _BuildError(Exception):
    """Why there is no library, in one line; stays inside this module."""


@functools.cache
def kernel_library() -> Path | None:
    """The shared library of the CPU kernels, compiled now if it has to be.

    Returns:
        Its path, or None when it cannot be built; then one warning names the cause and what to do about it.
    """
    try:
        return _find_or_build(_compiler())
    except (_BuildError, OSError) as error:
        logger.warning(
            "CPU kernels are off, the plain reference runs instead (right, but several times slower): %s. "
            "Install g++ (or clang++ with OpenMP), or name a compiler in CXX, and start again.",
            error,
        )
        return None


def library_hash() -> str:
    """What computes on this CPU, for keys of caches: SHA-256 of the library in hex, or "reference" without one."""
    library = kernel_library()
    return _file_hash(library) if library else "reference"


def _compiler() -> list[str]:
    """The compiler's command: `CXX` if set, else the first of `COMPILERS` on the PATH."""
    asked_for = shlex.split(os.environ.get("CXX", ""))
    if asked_for:
        if shutil.which(asked_for[0]) is None:
            raise _BuildError(f"CXX names {asked_for[0]!r}, which is not an executable on the PATH")
        return asked_for
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise _BuildError(f"no C++ compiler on the PATH (looked for {', '.join(COMPILERS)})")


def _find_or_build(compiler: list[str]) -> Path:
    command = [*compiler, *FLAGS, _machine_flag()]
    folder = user_cache("kernels") / _key(command, _run([*compiler, "--version"]))
    library = folder / LIBRARY_NAME
    if _is_whole(library):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        if not _is_whole(library):
            _build(command, library)
    return library


def _build(command: list[str], library: Path) -> None:
    """Compile, then rename: a process keeps the damaged library that it has mapped, and none sees half of one."""
    logger.info("compiling the CPU kernels with %s into %s", command[0], library.parent)
    sources = sorted(str(path) for path in SOURCE_DIR.glob("*.cc"))
    fresh = library.with_suffix(".new")
    _run([*command, *sources, "-o", str(fresh)])
    fresh.replace(library)
    _checksum_file(library).write_text(_file_hash(library))  # killed before this: the next process compiles again


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _BuildError(f"{command[0]} did not finish within {COMPILE_SECONDS} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line or "cannot find" in line]
        cause = (telling or lines or ["no message"])[0]
        raise _BuildError(f"{command[0]} failed with status {done.returncode}: {cause.strip()}")
    return done.stdout


def _is_whole(library: Path) -> bool:
    """Whether the library is there and has the checksum in the file next to it."""
    checksum = _checksum_file(library)
    return library.is_file() and checksum.is_file() and checksum.read_text() == _file_hash(library)


def _checksum_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _machine_flag() -> str:
    # On ARM -march=native picks the instruction set without the tuning; on x86 -mcpu is deprecated.
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(command: list[str], version: str) -> str:
    digest = hashlib.sha256()
    for part in (*command, version, _processor()):
        digest.update(part.encode() + b"\0")
    for path in sorted([*SOURCE_DIR.glob("*.cc"), *SOURCE_DIR.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: model and instruction sets, in the words of /proc/cpuinfo (first processor)."""
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    return "\n".join(
        [platform.machine(), *(line for line in first.splitlines() if line.split("\t")[0].strip() in wanted)]
    )
