"""`ms-varlen`: parse, build, call one function.

    ms-varlen train recipes/quickstart.yaml train.steps=20
    ms-varlen align recipes/align_cpu.yaml --steps 20

Exit status 0 only when all is well; 1 for a fault that the message explains, 2 for a wrong command line. Tables and
logs are for people; with `--json` one object goes to stdout and nothing else.
"""

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ms_varlen.checkpoint.run_dir import dotted, make_output_dir
from ms_varlen.errors import VarlenError
from ms_varlen.train.recipe import load_recipe, recipe_schema

HELP = """Train language models on sequences of very different lengths: look, plan, train, align.

\b
ms-varlen stats pydoc
ms-varlen plan recipes/quickstart.yaml
ms-varlen train recipes/quickstart.yaml train.steps=20
ms-varlen align recipes/align_cpu.yaml --steps 20

Exit status 0 only when all is well, 1 for a fault that the message explains, 2 for a wrong command line.
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
people = Console(stderr=True)

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe in YAML.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Recipe keys to set, e.g. train.steps=20.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    # Read by OpenMP and MindSpore when they are loaded, so before the first import of MindSpore. Spinning threads take
    # the cores from each other; MindSpore's warnings on loading its own compile cache are not about the user's run.
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("GLOG_v", "3")
    # MindSpore takes SIGINT over while graphs run, and turns it into a SIGTERM.
    signal.signal(signal.SIGTERM, _interrupt)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments  # anywhere on the line; listed by the option of `_options`
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO,
        format="%(message)s",
        handlers=[RichHandler(console=people, show_path=False, rich_tracebacks=False)],
    )
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("ms_varlen").setLevel(logging.DEBUG if debug else logging.INFO)
    try:
        app(args=[a for a in arguments if a != "--debug"], prog_name="ms-varlen")
    except SystemExit as end:
        return int(end.code or 0)
    except (VarlenError, OSError) as error:
        if debug:
            raise
        people.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does, with status 130: locks are released, half-made files removed."""
    raise KeyboardInterrupt


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log more, and show tracebacks; anywhere on the line.")
    ] = False,
) -> None:
    pass


@app.command("train")
def train_command(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a recipe, going on where its last run stopped, and write report.html into its run folder.

    Exit status 1 also when the last step was skipped, its loss or gradient not being finite.
    """
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.report import write_report
    from ms_varlen.train.run import train

    with _progress() as bars:
        store, steps = _store_bar(bars), _StepBar(bars, loaded.train.steps)
        summary = train(loaded, steps, store)
    summary["report"] = str(write_report(Path(summary["run_folder"])))
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        shown = {
            "mode": loaded.mode,
            "steps": summary["step"],
            "loss": _rounded(summary["loss"]),
            "evaluation loss": _rounded(summary.get("eval_loss")),
            "skipped steps": summary.get("skipped_steps", 0),
            "graphs compiled": summary["graphs_compiled"],
            "run folder": summary["run_folder"],
            "report": summary["report"],
        }
        _print_table("trained", shown)
    raise typer.Exit(1 if summary.get("skipped") else 0)


@app.command("stats")
def stats_command(
    target: Annotated[
        str, typer.Argument(metavar="SOURCE|RECIPE", help="What data.source takes (pydoc, a .jsonl file), or a .yaml.")
    ],
    overrides: Overrides = None,
    tokenizer: Annotated[str | None, typer.Option(help="For a SOURCE: as data.tokenizer; default bytes.")] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="For a SOURCE: most tokens of a sample; default 2048.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    as_json: Json = False,
) -> None:
    """Show how long a corpus's documents are, what each mode would waste on them, and what to choose."""
    from ms_varlen.diagnose.planning_pages import stats_tables, write_stats_page
    from ms_varlen.diagnose.stats import corpus_stats, stats_recipe

    recipe = stats_recipe(target, tokenizer, seq_length, overrides or [])
    with _progress() as bars:
        result = corpus_stats(target, recipe, _store_bar(bars))
    if report is not None:
        result["report"] = str(write_stats_page(result, report))
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    for table in stats_tables(result):
        _print_columns(table.title, list(table.head), table.rows, list(table.notes), table.wide)
    _print_refused(result["refused"])


@app.command("plan")
def plan_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to plan for.")] = 1,
    report: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a recipe would run: steps, sizes, graphs, padding, balance, ledger, and advice. Needs no MindSpore."""
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.planning_pages import plan_tables, write_plan_page
    from ms_varlen.diagnose.stats import plan_advice
    from ms_varlen.train.workload import describe_plan, prepare

    with _progress() as bars:
        workload = prepare(loaded, _store_bar(bars), world_size)
    plan = describe_plan(workload) | plan_advice(loaded, workload.store, world_size)
    if report is not None:
        plan["report"] = str(write_plan_page(recipe.name, workload, plan, report))
    if as_json:
        print(json.dumps(plan, allow_nan=False))
        return
    lengths = {key: value for key, value in plan["lengths"].items() if key != "histogram"}
    _print_table("lengths of the training samples, tokens", lengths)
    _print_table("documents and tokens in cleaning", plan["cleaning"])
    shown_apart = ("lengths", "cleaning", "ledger", "modes", "shares", "windows", "advice", "refused")
    _print_table("plan of the first epoch", {key: value for key, value in plan.items() if key not in shown_apart})
    for table in plan_tables(plan):
        _print_columns(table.title, list(table.head), table.rows, list(table.notes), table.wide)
    _print_refused(plan["refused"])


@app.command("align")
def align_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 100,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference of a step's loss, in nats; default 2e-5 on a CPU (fp32), 1e-3 on Ascend (bf16)."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="HTML page to write; default align.html in checkpoint.output_dir.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the recipe's mode with dense padded attention, step by step; exit status 1 when they differ."""
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.align import align
    from ms_varlen.diagnose.alignment import save_alignment
    from ms_varlen.diagnose.report import write_align_report

    make_output_dir(loaded.checkpoint.output_dir)
    with _progress() as bars:
        store, bar = _store_bar(bars), bars.add_task("aligning", total=steps)
        result = align(
            loaded,
            steps,
            lambda step, loss, padded: bars.update(
                bar, completed=step, description=f"loss {loss:.4f}, difference {abs(loss - padded):.1e}"
            ),
            tolerance,
            store,
        )
    path = write_align_report(result, report or loaded.checkpoint.output_dir / "align.html")
    save_alignment(loaded, result)
    result["report"] = str(path)
    if as_json:
        print(json.dumps(_finite(result), allow_nan=False))
    else:
        shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
        _print_table("aligned" if result["passed"] else "NOT aligned", shown)
    raise typer.Exit(0 if result["passed"] else 1)


@app.command("bench")
def bench_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    modes: Annotated[
        str | None, typer.Option(help="Ways of our own to compare, by comma; default all of them.")
    ] = None,
    peers: Annotated[str, typer.Option(help="Others to compare with, by comma: torch, mindformers.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 12,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them, not timed.")] = 2,
    report: Annotated[Path | None, typer.Option(help="HTML page to write; default bench.html in output_dir.")] = None,
    as_json: Json = False,
) -> None:
    """Compare modes, shapes and other frameworks on the recipe's steps, in turns; exit status 1 when one fails."""
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.bench import BenchSettings, bench
    from ms_varlen.diagnose.bench_contenders import OURS
    from ms_varlen.diagnose.bench_report import bench_tables, write_bench_report

    settings = BenchSettings(
        modes.split(",") if modes else list(OURS), peers.split(",") if peers else [], steps, warmup
    )
    with _progress() as bars:
        bar = bars.add_task("bench", total=steps + warmup)
        result = bench(loaded, settings, lambda done: bars.update(bar, completed=done), _store_bar(bars))
    result["report"] = str(write_bench_report(result, report or loaded.checkpoint.output_dir / "bench.html"))
    if as_json:
        print(json.dumps(_finite(result), allow_nan=False))
    else:
        for table in bench_tables(result, short=True):
            _print_columns(table.title, table.head, table.rows, table.notes, wide=not table.notes)
        Console().print(f"report: {result['report']}", soft_wrap=True)
    raise typer.Exit(1 if any("error" in row for row in result["contenders"].values()) else 0)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a recipe, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
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


def _store_bar(bars: Progress) -> Callable[[float, int], None]:
    """A bar that appears when a token store is built."""
    tasks: list[Any] = []

    def tell(done: float, documents: int) -> None:
        if not tasks:
            tasks.append(bars.add_task("reading", total=100))
        bars.update(tasks[0], completed=round(100 * done), description=f"{documents} documents read, %")

    return tell


class _StepBar:
    """A bar over the steps; where there is no terminal, a line now and then."""

    def __init__(self, bars: Progress, steps: int):
        self._bars, self._steps = bars, steps
        self._task = bars.add_task("training", total=steps)

    def __call__(self, metrics: dict[str, Any]) -> None:
        step, loss = metrics["step"], metrics["loss"]
        text = f"loss {_rounded(loss)}, {metrics['tokens_real'] / metrics['step_ms']:.1f}k real tokens/s"
        self._bars.update(self._task, completed=step, description=text)
        if not people.is_terminal and (step % max(self._steps // 20, 1) == 0 or "eval_loss" in metrics):
            evaluated = f", evaluation loss {_rounded(metrics['eval_loss'])}" if "eval_loss" in metrics else ""
            logging.getLogger("ms_varlen").info("step %d of %d, %s%s", step, self._steps, text, evaluated)


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _finite(value: Any) -> Any:
    """NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and value - value != 0 else value


def _print_table(title: str, rows: dict[str, Any]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for key, value in dotted(rows):
        table.add_row(key, f"{value:.6g}" if isinstance(value, float) else str(value))
    Console().print(table)


def _print_columns(
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
        Console().print(note, markup=False, highlight=False, style="dim")
    Console().print()


def _print_refused(refused: dict[str, str]) -> None:
    for pair, why in refused.items():
        Console().print(f"not possible here: {pair}: {why}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
