"""Makes MindFormers know `VarlenDataLoader` and `VarlenMonitor`, in one of two ways.

1. In a start script, before `Trainer`: ``from ms_varlen.bridge.register import register; register()``.
2. Without any code: ``export REGISTER_PATH=.../ms_varlen/bridge`` (the folder of this file) and
   ``auto_register: register.VarlenDataLoader`` next to ``type: VarlenDataLoader``, the same for the monitor.
   MindFormers then copies this file and takes the class from it, so nothing here may depend on where it lies.
"""

from ms_varlen.bridge.install import require_mindformers

require_mindformers()

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister  # noqa: E402

from ms_varlen.bridge.loader import VarlenDataLoader  # noqa: E402
from ms_varlen.bridge.monitor import VarlenMonitor  # noqa: E402


def register() -> None:
    """Register our loader and our callback; calling it again changes nothing."""
    MindFormerRegister.register_cls(VarlenDataLoader, MindFormerModuleType.DATASET_LOADER)
    MindFormerRegister.register_cls(VarlenMonitor, MindFormerModuleType.CALLBACK)
