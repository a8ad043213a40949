"""What the commands share: running them, arguments, progress bars on stderr, tables on stdout."""

import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ms_varlen.errors import VarlenError
from ms_varlen.key_roles import dotted

people = Console(stderr=True)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe in YAML.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Recipe keys to set, e.g. train.steps=20.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def run_app(
    app: typer.Typer,
    name: str,
    argv: list[str] | None,
    message: Callable[[Exception, list[str]], str] = lambda error, _: str(error),
) -> int:
    """Run a command line.

    Args:
        app: the commands.
        name: of the program.
        argv: its arguments; by default the process's.
        message: what to say about an error, with the arguments at hand.
    Returns:
        the exit status: 1 for a fault that the message explains, 2 for a wrong command line.
    """
    # Read by OpenMP and MindSpore when they are loaded, so before the first import of MindSpore. Spinning threads take
    # the cores from each other; MindSpore's warnings on loading its own compile cache are not about the user's run.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    # MindSpore takes SIGINT over while graphs run, and turns it into a SIGTERM.
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments  # anywhere on the line; listed by `debug_option`
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=people, show_path=False, rich_tracebacks=False)],
    )
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("ms_varlen").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name=name)
    except SystemExit as end:
        return int(end.code or 0)
    except (VarlenError, OSError) as error:
        if debug:
            raise
        text = f"error: {message(error, arguments)}"
        people.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        code = error.code if isinstance(error, VarlenError) else None
        if code not in (None, "RECIPE"):  # whose entry says no more than the message does
            people.print(f"[{code}] ms-varlen doctor --explain {code}", markup=False, highlight=False)
        return 1
    return 0


def debug_option(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log more, and show tracebacks; anywhere on the line.")
    ] = False,
) -> None:
    """The callback of a program's commands: lists `--debug`, which `run_app` looks for."""


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does, with status 130: locks are released, half-made files and folders removed."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Progress bars on stderr; none where it is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=people, disable=not people.is_terminal) as bars:
        yield bars


def store_bar(bars: Progress) -> Callable[[float, int], None]:
    """A bar that appears when a token store is built."""
    tasks: list[Any] = []

    def tell(done: float, documents: int) -> None:
        if not tasks:
            tasks.append(bars.add_task("reading", total=100))
        bars.update(tasks[0], completed=round(100 * done), description=f"{documents} documents read, %")

    return tell


class StepBar:
    """A bar over the steps; where there is no terminal, a line now and then."""

    def __init__(self, bars: Progress, steps: int):
        self._bars, self._steps = bars, steps
        self._task = bars.add_task("training", total=steps)

    def __call__(self, metrics: dict[str, Any]) -> None:
        step, loss = metrics["step"], metrics["loss"]
        text = f"loss {rounded(loss)}, {metrics['tokens_real'] / metrics['step_ms']:.1f}k real tokens/s"
        self._bars.update(self._task, completed=step, description=text)
        if not people.is_terminal and (step % max(self._steps // 20, 1) == 0 or "eval_loss" in metrics):
            evaluated = f", evaluation loss {rounded(metrics['eval_loss'])}" if "eval_loss" in metrics else ""
            logging.getLogger("ms_varlen").info("step %d of %d, %s%s", step, self._steps, text, evaluated)


def rounded(value: float | None) -> str:
    """Four decimals, or a dash."""
    return "-" if value is None else f"{value:.4f}"


def finite(value: Any) -> Any:
    """NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and value - value != 0 else value


def print_table(title: str, rows: dict[str, Any]) -> None:
    """Names and values; nested ones under dotted names."""
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in dotted(rows):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        table.add_row(key, f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if is_number else str(value))
    Console().print(table)


def print_columns(
    title: str, head: list[str], rows: Sequence[Sequence[str]], notes: list[str], wide: bool = False
) -> None:
    """A table with names in the first column and numbers in the others, or sentences where it is `wide`."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for place, heading in enumerate(head):
        narrow = 22 if wide and place < len(head) - 1 else None
        justify: Literal["left", "right"] = "right" if place and not wide else "left"
        table.add_column(heading, justify=justify, overflow="fold", max_width=narrow, no_wrap=not (place or wide))
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    for note in notes:
        Console().print(note, markup=False, highlight=False, style="dim", soft_wrap=True)  # a command stays one line
    Console().print()


def advised_command(target: str, overrides: list[str] | None, advised: list[str]) -> str:
    """The shell command that trains a recipe with the advised overrides."""
    return shlex.join(["ms-varlen", "train", target, *(overrides or []), *advised])


def print_refused(refused: Mapping[str, str]) -> None:
    """Print the pairs of mode and shapes that are not possible, and why."""
    for pair, why in refused.items():
        Console().print(f"not possible here: {pair}: {why}", markup=False, soft_wrap=True)
