"""Checks of the machine: versions that belong together, compiler, CANN."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping

from ms_varlen.diagnose.doctor.findings import GREEN, RED, YELLOW, Check

TOGETHER = {"1.9": ("2.9", "9.0.0"), "1.8": ("2.7.2", "8.5.0"), "1.7": ("2.7.1", "8.3.RC1")}
"""MindFormers -> the MindSpore and the CANN that belong to it."""

MINDSPORE = "2.9"
PYTHONS = ((3, 10), (3, 12))
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
AREA = "environment"


def environment_checks(for_ascend: bool) -> Iterator[Check]:
    """Checks of Python, packages, compiler and CANN.

    Args:
        for_ascend: whether the recipe is meant for an NPU, here or elsewhere.
    """
    yield python_check(sys.version_info[:2])
    versions = {name: _version(name) for name in ("mindspore", "numpy", "mindformers")}
    yield from package_checks(versions)
    yield compiler_check()
    yield cann_check(os.environ, for_ascend)
    yield Check(
        AREA,
        GREEN,
        f"{platform.machine()}, {os.cpu_count()} processors, {_memory_gb():.1f} GB of memory, {platform.platform()}",
    )


def python_check(version: tuple[int, ...]) -> Check:
    """Whether MindSpore has a wheel for this Python."""
    text = f"Python {version[0]}.{version[1]}"
    if PYTHONS[0] <= version[:2] <= PYTHONS[1]:
        return Check(AREA, GREEN, text)
    return Check(
        AREA, RED, f"Python must be 3.10 to 3.12, got {text}; make the environment with one of them", "ENV-VERSIONS"
    )


def package_checks(versions: Mapping[str, str | None]) -> Iterator[Check]:
    """Whether the installed packages belong together.

    Args:
        versions: of mindspore, numpy and mindformers; None where one is missing.
    """
    mindspore, numpy, mindformers = versions["mindspore"], versions["numpy"], versions["mindformers"]
    if mindspore is None or not _is(mindspore, MINDSPORE):
        found = mindspore or "none"
        yield Check(
            AREA,
            RED,
            f"mindspore must be {MINDSPORE}.*, got {found}; pip install 'mindspore=={MINDSPORE}.*'",
            "ENV-VERSIONS",
        )
    else:
        yield Check(AREA, GREEN, f"mindspore {mindspore}")
    if numpy is None or int(numpy.split(".")[0]) >= 2:
        yield Check(
            AREA,
            RED,
            f"numpy must be below 2 (MindSpore's PyNative mode breaks), got {numpy}; pip install 'numpy<2'",
            "ENV-VERSIONS",
        )
    else:
        yield Check(AREA, GREEN, f"numpy {numpy}")
    if mindformers is None:
        yield Check(AREA, GREEN, "mindformers is not installed; only the bridge to it needs it")
        return
    pair = next((pair for name, pair in TOGETHER.items() if _is(mindformers, name)), None)
    if pair is None or mindspore is None or not _is(mindspore, pair[0]):
        wanted = f"mindspore {pair[0]}" if pair else f"one of mindformers {', '.join(TOGETHER)}"
        yield Check(
            AREA,
            YELLOW,
            f"mindformers {mindformers} must go with {wanted}, got mindspore {mindspore}; install the pair",
            "ENV-VERSIONS",
        )
    else:
        yield Check(AREA, GREEN, f"mindformers {mindformers}, which belongs to mindspore {pair[0]} and CANN {pair[1]}")


def compiler_check() -> Check:
    """Whether the CPU kernels are there or can be built (6 s the first time)."""
    from ms_varlen.ops.kernel_build import kernel_library

    library = kernel_library()
    if library is None:
        return Check(
            AREA,
            YELLOW,
            "a C++ compiler with OpenMP must be there for the CPU kernels, got none that works; install g++",
            "ENV-COMPILER",
        )
    return Check(AREA, GREEN, f"CPU kernels: {library}")


def cann_check(environment: Mapping[str, str], for_ascend: bool) -> Check:
    """Whether CANN is set up in this shell; without an NPU in question it need not be."""
    home = next((environment[name] for name in CANN_VARIABLES if environment.get(name)), None)
    if home is not None:
        return Check(AREA, GREEN, f"CANN at {home}")
    if shutil.which("npu-smi") is None:
        here = "; nothing of what follows ran on an NPU" if for_ascend else ""
        return Check(AREA, GREEN, f"no NPU and no CANN on this machine{here}")
    return Check(
        AREA,
        RED if for_ascend else YELLOW,
        f"{' or '.join(CANN_VARIABLES)} must be set where there is an NPU, got neither; source CANN's set_env.sh",
        "ENV-CANN",
    )


def _is(version: str, release: str) -> bool:
    """Whether a version is of a release: 2.9.0 and 2.9.0rc1 are of 2.9, 2.90 is not."""
    return version == release or version.startswith((release + ".", release + "rc"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
