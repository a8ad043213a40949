"""Trains with MindFormers' Trainer and our loader: ``python -m ms_varlen.bridge.run CONFIG.yaml``.

Checks the whole YAML first, registers loader and monitor, adds the monitor where the YAML has none, and on a CPU puts
the stand-ins of `ms_varlen.bridge.cpu` in place. On an NPU it does what MindFormers' own `run_mindformer.py` does with
the YAML.
"""

import os
import sys
from pathlib import Path

import yaml

from ms_varlen.bridge.checks import config_faults, refuse
from ms_varlen.bridge.config import MONITOR_TYPE
from ms_varlen.bridge.install import require_mindformers
from ms_varlen.errors import RecipeError, VarlenError


def check_file(path: str | Path) -> str:
    """Refuse a MindFormers YAML that would train on wrong lengths or labels.

    Returns:
        its `context.device_target`.
    Raises:
        RecipeError: one line for each fault.
    """
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that is none
        raise RecipeError([f"file: must be readable YAML, got {error}; mend it"], str(path)) from error
    refuse(config_faults(config), str(path))
    return (config.get("context") or {}).get("device_target") or "Ascend"


def train(path: str | Path) -> None:
    """Train as a MindFormers YAML says.

    Raises:
        VarlenError: MindFormers is missing, or what `check_file` refuses.
    """
    target = check_file(path)
    require_mindformers()
    os.environ.setdefault("REGISTER_PATH", str(Path(__file__).parent))  # for auto_register in the YAML
    import mindspore as ms

    if target == "CPU":
        ms.set_device(target)  # before MindFormers makes its context
    from mindformers.core.context import build_context
    from mindformers.tools.register import MindFormerConfig
    from mindformers.trainer import Trainer

    from ms_varlen.bridge.register import register

    register()
    config = MindFormerConfig(str(path))
    callbacks = config.callbacks or []
    if MONITOR_TYPE not in [callback["type"] for callback in callbacks]:
        config.callbacks = [*callbacks, {"type": MONITOR_TYPE}]  # it checks the network that MindFormers builds
    build_context(config)
    if target == "CPU":
        from ms_varlen.bridge.cpu import substitute_for_cpu

        substitute_for_cpu()
    Trainer(config).train()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    # Read by OpenMP when it is loaded: threads that spin take the cores from MindSpore's.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m ms_varlen.bridge.run CONFIG.yaml", file=sys.stderr)
        return 2
    try:
        train(arguments[0])
    except VarlenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
