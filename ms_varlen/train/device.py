"""The device and the execution mode of a process."""

import mindspore as ms

from ms_varlen.errors import RecipeError
from ms_varlen.graph.config import GraphConfig
from ms_varlen.recipe.sections import DeviceConfig

ASCEND = "Ascend"
CPU = "CPU"


def set_up_device(device: DeviceConfig, graph: GraphConfig) -> str:
    """Choose device and mode for this process, before anything runs on it.

    Args:
        device: the `device` section; `auto` takes an NPU if MindSpore sees one.
        graph: the `graph` section.
    Returns:
        "CPU" or "Ascend".
    Raises:
        RecipeError: the requested device is missing.
    """
    # MindSpore's default: Ascend if its libraries load. On a CPU, `hal.is_available` prints long warnings.
    target = ms.get_context("device_target") if device.target == "auto" else device.target
    if device.target == ASCEND and not ms.hal.is_available(ASCEND):
        raise RecipeError(
            ["device.target: must be a device that MindSpore sees, got Ascend and there is none; use auto or CPU"]
        )
    if (
        ms.get_context("device_target") != target
    ):  # after its first use MindSpore refuses the call, even without a change
        ms.set_device(target)
    ms.set_context(mode=ms.GRAPH_MODE if graph.mode == "graph" else ms.PYNATIVE_MODE)
    if graph.mode == "graph":
        ms.set_context(jit_config={"jit_level": graph.jit_level})
    elif target == CPU:
        ms.set_context(pynative_synchronize=True)  # small steps are four times faster, with the same results
    if device.deterministic:
        ms.set_deterministic(True)
    if device.max_memory is not None:
        ms.runtime.set_memory(max_size=device.max_memory)
    return target
