"""`scripts/msrun_launch.sh`: train a recipe on several ranks.

python -m ms_varlen.launch recipes/quickstart.yaml 2 -- train.steps=20
"""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ms_varlen.errors import VarlenError
from ms_varlen.launch.cluster import Cluster
from ms_varlen.launch.launch import Launch, shown
from ms_varlen.recipe.recipe import load_recipe

USAGE = "msrun_launch.sh RECIPE [N] [-- section.key=value ...]"
VARIABLES = """\
N is the number of ranks over all nodes, 8 if left out. Environment, as for MindFormers' msrun_launcher.sh:
  LOCAL_WORKER      ranks of this node (N)
  MASTER_ADDR       address of node 0 (127.0.0.1); on several nodes one that all of them reach
  MASTER_PORT       its port (8118)
  NODE_RANK         number of this node (0)
  LOG_DIR           folder of worker_0.log, worker_1.log, ... and scheduler.log (output/msrun_log)
  CLUSTER_TIME_OUT  seconds to wait for all nodes at the start (7200)
  STOP_SECONDS      seconds that ranks have to save and exit after SIGTERM or SIGINT (600)
Exit status: 0, also if the ranks were asked to stop and saved; the status of the rank that failed first, 137 if it was
killed; 143 (SIGTERM) or 130 (SIGINT) if they were stopped before their first step; 1 or 2 if nothing was started.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line."""
        overrides = re.search(r"\b\S+=\S*", message)
        hint = "; put -- before overrides" if overrides else ""
        self.exit(2, f"error: {message}{hint}; usage: {USAGE}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit status."""
    parser = _Parser(
        prog="msrun_launch.sh", usage=USAGE, epilog=VARIABLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("N", nargs="?", type=int, default=8)
    arguments = list(sys.argv[1:] if argv is None else argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given, overrides = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    try:
        cluster = Cluster.from_environment(given.N, os.environ)
        load_recipe(given.recipe, [override for override in overrides if not override.startswith("--")])
        cluster.check_address()
        launch = Launch(cluster, [given.recipe, *overrides])
    except VarlenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, launch.ask_to_stop)
    print(
        f"msrun_launch: {cluster.workers} ranks, {cluster.local_workers} on this node; logs in {cluster.log_dir}",
        file=sys.stderr,
        flush=True,
    )
    with shown(cluster.log_of(cluster.first_rank)):
        return launch.wait()


if __name__ == "__main__":
    sys.exit(main())
