"""Plants every fault that people make, and prints which code names it, who found it, and how long that took.

python scripts/fault_table.py                 # the table
python scripts/fault_table.py --mutations 300 # beside it: random mutations that no check was written for
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path


def show(name: str, found: tuple[str, str | None, float], expected: tuple[str, str | None]) -> bool:
    """Print a row; whether it is not as it must be."""
    who, code, seconds = found
    mark = "" if (who, code) == expected else f"   EXPECTED {expected}"
    print(f"{name:<52} {code or '-':<16} {who:<8} {seconds:.2f}{mark}")
    return bool(mark)


def main() -> int:
    """Print the table; 1 when a fault was not found or misnamed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=0, help="random mutations to try beside the table")
    parser.add_argument("--only", help="the fault with this name alone")
    options = parser.parse_args()
    os.environ.setdefault("GLOG_v", "3")  # before MindSpore is loaded
    from ms_varlen.testing.detection import (
        FILE_FAULTS,
        RECIPE_FAULTS,
        detection_rate,
        find,
        find_in_files,
        find_in_recipe,
        write_recipe,
    )
    from ms_varlen.testing.planted import FAULTS

    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder))
        faults = [fault for fault in FAULTS if options.only in (None, fault.name)]
        print(f"{'fault':<52} {'code':<16} {'found by':<8} seconds")
        for fault in [None, *faults]:
            expected = ("nobody", None) if fault is None else (fault.found_by, fault.code)
            wrong += show(fault.name if fault else "none (a healthy run)", find(fault, recipe), expected)
        if options.only is None:
            for name, code, overrides in RECIPE_FAULTS:
                wrong += show(name, find_in_recipe(recipe, overrides), ("doctor", code))
            for name, code in FILE_FAULTS.items():
                wrong += show(name, find_in_files(recipe, name), ("doctor", code))
        if options.mutations:
            print(json.dumps(detection_rate(recipe, options.mutations), indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
