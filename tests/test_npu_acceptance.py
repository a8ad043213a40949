import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "npu_acceptance.py"


@pytest.mark.graph
def test_every_assumption_is_tried_on_the_emulator(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=False, timeout=400, env=environment
    )
    result = json.loads(done.stdout)
    checks = result["checks"]
    assert (done.returncode, result["passed"]) == (0, True), checks
    assert "emulated" in result["note"]
    # What the documentation forbids, the emulator refuses: a fixed number of ends that repeats the last one.
    assert [name for name, check in checks.items() if not check["ok"]] == ["repeated_last_end"]
    assert not checks["repeated_last_end"]["required"]
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
