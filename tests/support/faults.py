"""Fault injection: the process kills itself (SIGKILL) at a named moment, without any hook in the code under test.

Used inside a child process that a test starts::

    with kill_at("half_file", step=20):
        train(...)

Nothing runs after the kill: no `finally`, no `atexit`, no flush, as with `kill -9` or a node that fails.
"""

import contextlib
import importlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest import mock

from ms_varlen.checkpoint.store import MODEL_FILE, step_name

Point = Literal["half_file", "before_rename", "after_rename"]


def kill_now() -> NoReturn:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


@contextlib.contextmanager
def _wrapped(target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    module, _, attribute = target.partition(":")
    owner = importlib.import_module(module)
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    with mock.patch.object(owner, name, wrap(getattr(owner, name))):
        yield


def kill_when(
    target: str, call: int = 1, before: bool = True, only: Callable[..., bool] = lambda *_, **__: True
) -> contextlib.AbstractContextManager[None]:
    """Kill the process at a call of a function or method.

    Args:
        target: "package.module:function" or "package.module:Class.method", where the caller looks it up.
        call: which call kills, counted from 1.
        before: kill in place of the call; else right after it returned.
        only: takes the call's arguments; calls for which it is false are not counted.
    """
    numbers = itertools.count(1)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def killing(*args: Any, **kwargs: Any) -> Any:
            if not only(*args, **kwargs) or next(numbers) != call:
                return original(*args, **kwargs)
            if not before:
                original(*args, **kwargs)
            kill_now()

        return killing

    return _wrapped(target, wrap)


def _kill_in_half_file(step: int) -> contextlib.AbstractContextManager[None]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def killing(tensors: Any, path: Path, **kwargs: Any) -> None:
            original(tensors, path, **kwargs)
            if path.name == MODEL_FILE and path.parent.name.endswith(step_name(step)):
                os.truncate(path, path.stat().st_size // 2)
                kill_now()

        return killing

    return _wrapped("ms_varlen.checkpoint.store:save_file", wrap)


def kill_at(point: Point, step: int) -> contextlib.AbstractContextManager[None]:
    """Kill the process while it saves the checkpoint of a step.

    Args:
        point: "half_file": half of the model file is written; "before_rename": all is written under the hidden name;
            "after_rename": the checkpoint is in place, old ones are not yet pruned.
        step: whose checkpoint.
    """
    if point == "half_file":
        return _kill_in_half_file(step)

    def publishes(_source: Path, target: Path, **_: Any) -> bool:
        return Path(target).name == step_name(step)

    return kill_when("os:rename", before=point == "before_rename", only=publishes)
