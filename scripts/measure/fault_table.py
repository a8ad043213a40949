"""Plants every fault that people make, and prints which code names it, who found it, and how long that took.

python scripts/measure/fault_table.py                 # the table
python scripts/measure/fault_table.py --mutations 300 # also: random mutations that no check was written for
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the faults are planted by tests.support

Found = tuple[str, str | None, float]
Row = tuple[str, tuple[str, str | None], Callable[[], Found]]
"""A fault's name, who must find it under which code, and what tries."""


def rows(recipe: Path) -> list[Row]:
    """All rows of the table, the healthy ones too."""
    from tests.support import detection, planted, rank_faults

    find, doctor = functools.partial, detection.find_in_recipe
    ranks, nobody = rank_faults.find_between_ranks, ("nobody", None)
    return [
        ("none (a healthy run)", nobody, find(detection.find, None, recipe)),
        *((fault.name, (fault.found_by, fault.code), find(detection.find, fault, recipe)) for fault in planted.FAULTS),
        ("none (two ranks)", nobody, find(ranks, recipe, None)),
        *((name, ("ranks", code), find(ranks, recipe, name)) for name, code in rank_faults.RANK_FAULTS.items()),
        ("none (ends on the host)", nobody, find(rank_faults.find_on_device, recipe, False)),
        (rank_faults.DEVICE_FAULT, ("emulator", "LEN-DEVICE"), find(rank_faults.find_on_device, recipe, True)),
        *((name, ("doctor", code), find(doctor, recipe, changes)) for name, code, changes in detection.RECIPE_FAULTS),
        *(
            (name, ("doctor", code), find(detection.find_in_files, recipe, name))
            for name, code in detection.FILE_FAULTS.items()
        ),
    ]


def show(name: str, expected: tuple[str, str | None], found: Found) -> bool:
    """Print a row; whether it is not as it must be."""
    who, code, seconds = found
    mark = "" if (who, code) == expected else f"   EXPECTED {expected}"
    print(f"{name:<52} {code or '-':<16} {who:<8} {seconds:.2f}{mark}", flush=True)
    return bool(mark)


def main() -> int:
    """Print the table; 1 when a fault was not found or misnamed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=0, help="random mutations to try after the table")
    parser.add_argument("--only", help="the row with this name alone")
    options = parser.parse_args()
    os.environ.setdefault("GLOG_v", "3")  # before MindSpore is loaded
    from tests.support.detection import detection_rate, write_recipe

    with tempfile.TemporaryDirectory() as folder:
        recipe = write_recipe(Path(folder))
        chosen = [row for row in rows(recipe) if options.only in (None, row[0])]
        if not chosen:
            parser.error(f"--only: must be the name of a row, got {options.only!r}; run without it to see all")
        print(f"{'fault':<52} {'code':<16} {'found by':<8} seconds")
        wrong = sum(show(name, expected, find()) for name, expected, find in chosen)
        if options.mutations:
            print(json.dumps(detection_rate(recipe, options.mutations), indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
