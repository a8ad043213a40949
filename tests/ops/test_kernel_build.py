import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ms_varlen.ops import kernel_build

# Stands in for g++: tells its version, notes each compilation in `log`, and writes some bytes where -o says.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake {version}"; exit 0; fi
echo compiled >> {log}
sleep 0.3
for output; do :; done
echo "library {version}" > "$output"
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A compiler that counts its runs, and a cache of its own; returns how often it compiled."""
    log = tmp_path / "log"
    write_compiler(tmp_path / "fake-g++", FAKE_COMPILER.format(version=1, log=log))
    monkeypatch.setenv("CXX", str(tmp_path / "fake-g++"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel_build.kernel_library.cache_clear()
    yield lambda: len(log.read_text().splitlines()) if log.exists() else 0
    kernel_build.kernel_library.cache_clear()


def write_compiler(path, text):
    path.write_text(text)
    path.chmod(0o755)


def find_again():
    kernel_build.kernel_library.cache_clear()
    return kernel_build.kernel_library()


def test_library_is_compiled_once_and_found_again(fake, tmp_path):
    first = kernel_build.kernel_library()
    assert first.read_text() == "library 1\n"
    assert first.parent.parent == tmp_path / "cache" / "ms_varlen" / "kernels"
    assert find_again() == first
    assert fake() == 1


def test_damaged_library_is_compiled_again(fake):
    library = kernel_build.kernel_library()
    library.write_text("libr")
    assert find_again().read_text() == "library 1\n"
    assert fake() == 2


def test_library_without_checksum_is_compiled_again(fake):
    kernel_build.kernel_library().with_suffix(".sha256").unlink()
    assert find_again().is_file()
    assert fake() == 2


def test_another_compiler_version_gets_a_library_of_its_own(fake, tmp_path):
    first = kernel_build.kernel_library()
    write_compiler(tmp_path / "fake-g++", FAKE_COMPILER.format(version=2, log=tmp_path / "log"))
    second = find_again()
    assert second.parent != first.parent
    assert (first.read_text(), second.read_text()) == ("library 1\n", "library 2\n")


@pytest.mark.parametrize("changed", ["FLAGS", "processor", "source"])
def test_key_covers_flags_processor_and_sources(fake, monkeypatch, tmp_path, changed):
    first = kernel_build.kernel_library()
    if changed == "FLAGS":
        monkeypatch.setattr(kernel_build, "FLAGS", (*kernel_build.FLAGS, "-g"))
    elif changed == "processor":
        monkeypatch.setattr(kernel_build, "_processor", lambda: "another")
    else:
        (tmp_path / "csrc").mkdir()
        (tmp_path / "csrc" / "other.cc").write_text("int x;")
        monkeypatch.setattr(kernel_build, "SOURCE_DIR", tmp_path / "csrc")
    assert find_again().parent != first.parent
    assert fake() == 2


@pytest.mark.ranks
def test_processes_that_start_together_compile_once(fake):
    program = "from ms_varlen.ops.kernel_build import kernel_library; print(kernel_library())"
    root = Path(kernel_build.__file__).parents[2]
    started = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(5)
    ]
    paths = {process.communicate()[0].strip() for process in started}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "library 1\n"
    assert fake() == 1


def assert_one_warning(caplog, *words):
    with caplog.at_level(logging.WARNING, logger="ms_varlen"):
        assert kernel_build.kernel_library() is None
        assert kernel_build.kernel_library() is None
        assert kernel_build.library_hash() == "reference"
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    for word in (*words, "plain reference", "Install g++"):
        assert word in message


def test_missing_compiler_is_logged_once_and_gives_no_library(fake, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_one_warning(caplog, "no C++ compiler on the PATH (looked for g++, clang++)")


def test_compiler_named_in_cxx_must_exist(fake, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    assert_one_warning(caplog, "CXX names 'no-such-compiler'")


def test_broken_compiler_is_logged_once_with_its_own_words(fake, tmp_path, caplog):
    write_compiler(
        tmp_path / "fake-g++",
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "In file a.h:\na.h:1: error: no <vector>" >&2\nexit 1\n',
    )
    assert_one_warning(caplog, "failed with status 1: a.h:1: error: no <vector>")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_cache_that_cannot_be_written_is_logged_once(fake, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_one_warning(caplog, "Not a directory")


def test_gxx_is_tried_before_clang(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    write_compiler(tmp_path / "clang++", "#!/bin/sh\n")
    assert kernel_build._compiler() == ["clang++"]
    write_compiler(tmp_path / "g++", "#!/bin/sh\n")
    assert kernel_build._compiler() == ["g++"]


def test_hash_matches_the_library(fake):
    library = kernel_build.kernel_library()
    assert kernel_build.library_hash() == library.with_suffix(".sha256").read_text()
    assert len(kernel_build.library_hash()) == 64
