"""MindSpore's profiler around some steps of a run."""

from pathlib import Path

import mindspore as ms


class StepProfiler:
    """Records the steps that `device.profile_steps` names.

    Args:
        steps: first and last step, counted from 1; None records none.
        folder: where the records go.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path):
        self._steps, self._folder = steps, folder
        self._profile: ms.profiler.profile | None = None

    def before(self, step: int) -> None:
        """Called before each step."""
        if self._steps is not None and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            handler = ms.profiler.tensorboard_trace_handler(str(self._folder))
            self._profile = ms.profiler.profile(start_profile=False, on_trace_ready=handler)
            self._profile.start()

    def after(self, step: int, last: bool) -> None:
        """Called after each step; `last` ends a record that would continue."""
        if self._steps is not None and self._profile is not None and (step == self._steps[1] or last):
            self._profile.stop()
            self._profile = None
            self._steps = None
