import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "npu_acceptance.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("npu_acceptance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("required", "card", "emulate", "expected"),
    [
        (True, True, False, (True, 0)),
        (False, True, False, (False, 1)),
        (True, False, False, (None, 2)),
        (False, False, False, (None, 2)),
        (True, False, True, (None, 0)),
        (False, False, True, (None, 1)),
    ],
)
def test_only_a_card_can_pass(script, required, card, emulate, expected):
    results = {"one": {"ok": required, "required": True}, "other": {"ok": False, "required": False}}
    assert script.verdict(results, card, emulate) == expected


def test_lines_tell_what_is_optional(script):
    assert script.told("x", {"ok": False, "required": False}) == "not so (optional): x"
    assert script.told("x", {"ok": False, "required": True}) == "FAILED: x"
    assert script.told("x", {"ok": True, "required": False}) == "held: x"


def test_result_of_a_check_does_not_depend_on_what_is_printed(script, monkeypatch):
    noisy = "import sys\nopen(sys.argv[-1], 'w').write('{\"ok\": true}')\nprint('goodbye')\nsys.exit(1)"
    run = subprocess.run
    monkeypatch.setattr(script.subprocess, "run", lambda c, **o: run([c[0], "-c", noisy, *c[2:]], **o))
    assert script.in_own_process("versions") == {"ok": True}


def test_failed_check_alone_ends_with_status_1(script, monkeypatch, capsys):
    monkeypatch.setitem(script.CHECKS, "versions", lambda: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["npu_acceptance.py", "--check", "versions"])
    assert script.main() == 1
    assert json.loads(capsys.readouterr().out)["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.graph
def test_every_assumption_is_tried_on_the_emulator(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--emulate"], capture_output=True, text=True, check=False, timeout=400, env=environment
    )
    result = json.loads(done.stdout)
    checks = result["checks"]
    assert (done.returncode, result["passed"]) == (0, None), checks
    assert "emulated" in result["note"]
    # What the documentation forbids, the emulator refuses: a fixed number of ends that repeats the last one.
    assert [name for name, check in checks.items() if not check["ok"]] == ["repeated_last_end"]
    assert not checks["repeated_last_end"]["required"]
    assert "not so (optional): repeated_last_end" in done.stderr
    assert set(checks) == {
        "versions",
        "kernel_against_reference",
        "ends_int64",
        "ends_computed_on_device",
        "ends_of_a_padded_tail",
        "repeated_last_end",
        "most_segments",
        "gradient_against_reference",
        "jit_level_o0",
        "jit_level_o1",
        "training_and_cache",
        "shapes_of_a_range",
    }
    assert all(check["seconds"] >= 0 for check in checks.values())
    assert checks["training_and_cache"]["max_abs_diff"] < 1e-5
