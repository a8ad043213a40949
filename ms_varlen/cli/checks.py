"""The commands of `ms-varlen` that check and compare: doctor, lint-batches, align, bench."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from ms_varlen.catalogue import catalogue, explain
from ms_varlen.checkpoint.run_folder import make_output_dir
from ms_varlen.console import (
    Json,
    Overrides,
    RecipeArgument,
    finite,
    print_columns,
    print_table,
    progress_bars,
    store_bar,
)
from ms_varlen.errors import RecipeError
from ms_varlen.modes import Mode
from ms_varlen.recipe.recipe import load_recipe


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("doctor")(doctor_command)
    app.command("lint-batches")(lint_command)
    app.command("align")(align_command)
    app.command("bench")(bench_command)


Language = Annotated[Literal["en", "zh"], typer.Option(help="Language of the catalogue.")]


def doctor_command(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Recipe in YAML, or the folder of a run.")
    ] = None,
    overrides: Overrides = None,
    full: Annotated[
        bool, typer.Option("--full", help="Look at every micro-batch of an epoch, not at a sample.")
    ] = False,
    for_device: Annotated[
        Literal["ascend"] | None, typer.Option("--for", help="Check this device's limits too, wherever this runs.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Compile the graphs and run one step; nothing is saved.")] = True,
    performance: Annotated[
        bool, typer.Option("--performance", help="Measure instead why a run is no faster than padding.")
    ] = False,
    list_all: Annotated[bool, typer.Option("--list", help="Print the whole catalogue as a table.")] = False,
    explain_code: Annotated[str | None, typer.Option("--explain", metavar="CODE", help="Explain a code.")] = None,
    lang: Language = "en",
    as_json: Json = False,
) -> None:
    """Look at environment, recipe, data, plan, checkpoints and one probe step; exit status 1 when something is red."""
    if explain_code is not None or list_all:
        _print_catalogue(explain_code, lang, as_json)
        return
    if recipe is None:
        raise RecipeError(["RECIPE: must be given, got none; or use --list or --explain CODE"], "doctor")
    from ms_varlen.diagnose.doctor.doctor import examine, recipe_of

    with progress_bars() as bars:
        if performance:
            from ms_varlen.diagnose.doctor.performance import examine_performance

            result = examine_performance(recipe_of(recipe, overrides or []), store_bar(bars))
        else:
            result = examine(recipe, overrides or [], full, for_device == "ascend", probe, store_bar(bars))
    if as_json:
        print(json.dumps(finite(result), allow_nan=False))
    else:
        _print_checks(result["checks"])
    raise typer.Exit(1 if result["worst"] == "red" else 0)


def _print_checks(checks: list[dict[str, str]]) -> None:
    colours = {"green": "green", "yellow": "yellow", "red": "bold red"}
    console = Console()
    for check in checks:
        code = f" [{check['code']}]" if check["code"] else ""
        console.print(f"{check['level']:<7}", style=colours[check["level"]], end="")
        console.print(f"{check['area']:<14}{check['text']}{code}", markup=False, highlight=False, soft_wrap=True)
    codes = sorted({check["code"] for check in checks if check["code"]})
    if codes:
        console.print(f"more about a code: ms-varlen doctor --explain {codes[0]}", style="dim")


def _print_catalogue(code: str | None, language: str, as_json: bool) -> None:
    entries = [explain(code, language)] if code is not None else list(catalogue(language).values())
    if as_json:
        print(json.dumps([vars(entry) for entry in entries], ensure_ascii=False))
    elif code is not None:
        print_table(
            f"{entries[0].code}: {entries[0].title}", {k: v for k, v in vars(entries[0]).items() if k != "code"}
        )
    else:
        head = ["code", "symptom", "check", "remedy"]
        rows = [[entry.code, entry.symptom, entry.check, entry.remedy] for entry in entries]
        print_columns("catalogue", head, rows, [], wide=True)


def lint_command(
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Dumped batches: .npz or .jsonl.")] = None,
    pad_id: Annotated[int | None, typer.Option(help="The id that padding has; finds padding that is a target.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Batches to look at; default all.")] = None,
    how: Annotated[bool, typer.Option("--how", help="Print how to dump batches from other frameworks.")] = False,
    as_json: Json = False,
) -> None:
    """Find wrong lengths, positions, labels and padding in batches of any loader; exit status 1 when there are some."""
    from ms_varlen.diagnose.lint.files import HOW, lint_file

    if how:
        print(HOW)
        return
    if file is None:
        raise RecipeError(
            ["FILE: must be given, got none; `ms-varlen lint-batches --how` shows how to make one"], "lint"
        )
    result = lint_file(file, pad_id, limit)
    if as_json:
        print(json.dumps(result))
    else:
        console = Console()
        for row in result["findings"][:50]:
            console.print(
                f"batch {row['batch']}: {row['code']}: {row['text']}", markup=False, highlight=False, soft_wrap=True
            )
        print_table(
            "linted", {key: result[key] for key in ("file", "batches", "pad_id")} | {"findings": result["codes"] or 0}
        )
    raise typer.Exit(1 if result["findings"] else 0)


Tolerance = Annotated[
    float | None,
    typer.Option(
        help="Largest difference of a step's loss, in nats; default from the noise floor that is measured, 2e-5 to "
        "1e-3 on a CPU (fp32), 1e-3 on Ascend (bf16)."
    ),
]
StartFrom = Annotated[
    Path | None,
    typer.Option("--from", help="Checkpoint of any mode, step_NNNNNNNN, that both sides begin with; default none."),
]


def align_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 100,
    tolerance: Tolerance = None,
    start_from: StartFrom = None,
    against: Annotated[Mode, typer.Option(help="The layout to compare with.")] = Mode.PADDED,
    report: Annotated[
        Path | None, typer.Option(help="HTML page to write; default align.html in checkpoint.output_dir.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the recipe's mode with another, step by step, dense padded attention by default.

    Where they differ, says on which kind of batch, sample, layer and tensor it begins. Exit status 1 when they differ.
    """
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.align.align import align
    from ms_varlen.diagnose.align.alignment import save_alignment
    from ms_varlen.diagnose.pages.run_page import write_align_report

    page = report or loaded.checkpoint.output_dir / "align.html"
    _check_page(loaded.checkpoint.output_dir, page)
    with progress_bars() as bars:
        store, bar = store_bar(bars), bars.add_task("aligning", total=steps)

        def on_step(step: int, loss: float, other: float) -> None:
            words = f"loss {loss:.4f}, difference {abs(loss - other):.1e}"
            bars.update(bar, completed=step, description=words)

        result = align(loaded, steps, on_step, tolerance, store, start_from, against)
    written = write_align_report(result, page)
    save_alignment(loaded, result)
    _print_alignment(result.to_json() | {"report": str(written)}, as_json)
    raise typer.Exit(0 if result.verdict.passed else 1)


def _check_page(output_dir: Path, page: Path) -> None:
    """Make the folder of a run, and refuse a page that cannot be written, before the work that it shows."""
    from ms_varlen.files import folder_fault

    make_output_dir(output_dir)
    fault = folder_fault(page.parent)
    if fault is not None:
        raise RecipeError(
            [f"--report: must be in a folder that can be written, got {page} ({fault}); choose another"], "align"
        )


def _print_alignment(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(finite(result), allow_nan=False))
        return
    shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
    print_table("aligned" if result["passed"] else "NOT aligned", shown)
    if result["bisect"]:
        print_table("where it begins", result["bisect"])


def bench_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Ways of our own to compare, by comma, varlen_range among them: varlen_range, varlen_static, packed, "
            "packed_dense, bucketed, padded, padded_batch, varlen_recompile; default all of them."
        ),
    ] = None,
    peers: Annotated[str, typer.Option(help="Others to compare with, by comma: torch, mindformers.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 12,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them, not timed.")] = 2,
    ranks: Annotated[
        int, typer.Option(min=1, help="Ranks on this machine whose start is measured too; 1 leaves it out.")
    ] = 2,
    report: Annotated[Path | None, typer.Option(help="HTML page to write; default bench.html in output_dir.")] = None,
    as_json: Json = False,
) -> None:
    """Compare modes, shapes and other frameworks on the recipe's steps, in turns; exit status 1 when one fails.

    Example: ms-varlen bench recipes/bench_cpu.yaml --modes varlen_range,padded --peers torch
    """
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.bench.arena import BenchSettings
    from ms_varlen.diagnose.bench.bench import bench
    from ms_varlen.diagnose.bench.contenders import OURS
    from ms_varlen.diagnose.pages.bench_page import bench_tables, write_bench_report

    settings = BenchSettings(
        modes.split(",") if modes else list(OURS), peers.split(",") if peers else [], steps, warmup, ranks
    )
    with progress_bars() as bars:
        bar = bars.add_task("bench", total=settings.all_rounds)
        result = bench(loaded, settings, lambda: bars.advance(bar), store_bar(bars))
    result["report"] = str(write_bench_report(result, report or loaded.checkpoint.output_dir / "bench.html"))
    if as_json:
        print(json.dumps(finite(result), allow_nan=False))
    else:
        for table in bench_tables(result, short=True):
            print_columns(table.title, table.head, table.rows, table.notes, wide=not table.notes)
        Console().print(f"report: {result['report']}", soft_wrap=True)
    raise typer.Exit(1 if any("error" in row for row in result["contenders"].values()) else 0)
