"""`ms-varlen`: parse, build, call one function.

    ms-varlen train recipes/quickstart.yaml train.steps=20
    ms-varlen align recipes/align_cpu.yaml --steps 20

Exit status 0 only when all is well; 1 for a fault that the message explains, 2 for a wrong command line. Tables and
logs are for people; with `--json` one object goes to stdout and nothing else.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ms_varlen.cli import checks as cli_checks
from ms_varlen.console import (
    Json,
    Overrides,
    RecipeArgument,
    StepBar,
    advised_command,
    debug_option,
    print_columns,
    print_refused,
    print_table,
    progress_bars,
    rounded,
    run_app,
    store_bar,
)
from ms_varlen.errors import RecipeError
from ms_varlen.recipe.recipe import load_recipe, recipe_schema

HELP = """Train language models on sequences of very different lengths: look, plan, train, align.

\b
ms-varlen doctor recipes/quickstart.yaml
ms-varlen data pydoc
ms-varlen stats pydoc
ms-varlen plan recipes/quickstart.yaml
ms-varlen train recipes/quickstart.yaml train.steps=20
ms-varlen align recipes/align_cpu.yaml --steps 20

Exit status 0 only when all is well, 1 for a fault that the message explains, 2 for a wrong command line.
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
app.callback()(debug_option)
cli_checks.register(app)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    return run_app(app, "ms-varlen", argv, message=_naming_recipe)


def _naming_recipe(error: Exception, arguments: list[str]) -> str:
    """The message; what is found wrong with a recipe long after it was read is told under its file's name, too."""
    text, nameless = str(error), "recipe: "
    files = [a for before, a in itertools.pairwise(arguments) if a.endswith((".yaml", ".yml")) and before != "--output"]
    if isinstance(error, RecipeError) and text.startswith(nameless) and files:
        return f"{files[0]}: {text.removeprefix(nameless)}"
    return text


@app.command("train")
def train_command(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train a recipe, going on where its last run stopped, and write report.html into its run folder.

    Exit status 1 also when the last step was skipped, its loss or gradient not being finite.
    """
    loaded = load_recipe(recipe, overrides or [])
    from ms_varlen.diagnose.pages.run_page import write_report
    from ms_varlen.train.run import train

    with progress_bars() as bars:
        store, steps = store_bar(bars), StepBar(bars, loaded.train.steps)
        summary = train(loaded, steps, store)
    if summary["rank"] > 0:
        return  # rank 0 writes and tells
    summary["report"] = str(write_report(Path(summary["run_folder"])))
    if as_json:
        print(json.dumps(summary, allow_nan=False))
    else:
        shown = {
            "mode": loaded.mode,
            "steps": summary["step"],
            "loss": rounded(summary["loss"]),
            "evaluation loss": rounded(summary.get("eval_loss")),
            "skipped steps": summary.get("skipped_steps", 0),
            "graphs compiled": summary["graphs_compiled"],
            "run folder": summary["run_folder"],
            "report": summary["report"],
        }
        print_table("stopped and saved" if summary.get("stopped") else "trained", shown)
    raise typer.Exit(1 if summary.get("skipped") else 0)


@app.command("stats")
def stats_command(
    target: Annotated[
        str,
        typer.Argument(metavar="SOURCE|RECIPE", help="What data.source takes (pydoc, files, a folder), or a .yaml."),
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
    from ms_varlen.diagnose.advise.stats import corpus_stats, stats_recipe
    from ms_varlen.diagnose.pages.planning_pages import stats_tables, write_stats_page

    recipe = stats_recipe(target, tokenizer, seq_length, overrides or [])
    with progress_bars() as bars:
        stats = corpus_stats(target, recipe, store_bar(bars))
    command = advised_command(target, overrides, stats.comparison.advised_overrides)
    page = {} if report is None else {"report": str(write_stats_page(stats, command, report))}
    if as_json:
        print(json.dumps({**stats.to_json(), "advised_command": command, **page}, allow_nan=False))
        return
    for table in stats_tables(stats, command):
        print_columns(table.title, list(table.head), table.rows, list(table.notes), table.wide)
    print_refused(stats.comparison.refused)


@app.command("data")
def data_command(
    target: Annotated[
        str,
        typer.Argument(metavar="SOURCE|RECIPE", help="What data.source takes (pydoc, files, a folder), or a .yaml."),
    ],
    overrides: Overrides = None,
    tokenizer: Annotated[str | None, typer.Option(help="For a SOURCE: as data.tokenizer; default bytes.")] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="For a SOURCE: most tokens of a sample; default 2048.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="HTML page to write.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a corpus holds and what becomes of it: kinds, what is removed or cut with examples, lengths."""
    from rich.markup import escape

    from ms_varlen.diagnose.advise.stats import stats_recipe
    from ms_varlen.diagnose.pages.data_page import data_report, data_tables, example_tables, write_data_page

    recipe = stats_recipe(target, tokenizer, seq_length, overrides or [])
    with progress_bars() as bars:
        result = data_report(target, recipe, store_bar(bars))
    if report is not None:
        result["report"] = str(write_data_page(result, report))
    if as_json:
        print(json.dumps(result, allow_nan=False))
        return
    for table in [*data_tables(result), *example_tables(result)]:
        rows = [[escape(cell) for cell in row] for row in table.rows]
        print_columns(table.title, list(table.head), rows, list(table.notes), table.wide)


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
    from ms_varlen.diagnose.advise.stats import Comparison
    from ms_varlen.diagnose.pages.planning_pages import plan_tables, write_plan_page
    from ms_varlen.workload.summary import PlanSummary
    from ms_varlen.workload.workload import prepare

    with progress_bars() as bars:
        workload = prepare(loaded, store_bar(bars), world_size)
    plan = PlanSummary.of(workload)
    comparison = Comparison.of(loaded, workload.store, own=True, world_size=world_size)
    command = advised_command(str(recipe), overrides, comparison.advised_overrides)
    values, page = plan.to_json(), {}
    if report is not None:
        page["report"] = str(write_plan_page(recipe.name, workload, plan, comparison, command, report))
    if as_json:
        print(json.dumps({**values, **comparison.to_json(), "advised_command": command, **page}, allow_nan=False))
        return
    lengths = {key: value for key, value in plan.lengths.items() if key != "histogram"}
    print_table("lengths of the training samples, tokens", lengths)
    print_table("documents and tokens in cleaning", values["cleaning"])
    shown = {key: value for key, value in values.items() if key not in ("lengths", "cleaning", "ledger")}
    print_table("plan of the first epoch", {**shown, **page})
    for table in plan_tables(plan, comparison, command):
        print_columns(table.title, list(table.head), table.rows, list(table.notes), table.wide)
    print_refused(comparison.refused)


@app.command("mindformers-recipe")
def mindformers_recipe_command(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    family: Annotated[str, typer.Option(help="Model of MindFormers: qwen3 (its core) or llama (legacy).")] = "qwen3",
    data_parallel: Annotated[int, typer.Option(min=1, help="Devices with rows of their own.")] = 1,
    model_parallel: Annotated[int, typer.Option(min=1, help="Devices that share each layer.")] = 1,
    pipeline_stage: Annotated[int, typer.Option(min=1, help="Groups of layers on devices of their own.")] = 1,
    output: Annotated[Path | None, typer.Option(help="YAML file to write; default: stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --output.")] = False,
) -> None:
    """Turn a recipe into a YAML for MindFormers' Trainer, with our loader in it."""
    from ms_varlen.bridge.recipes import Devices, write_mindformers_recipe

    devices = Devices(data_parallel, model_parallel, pipeline_stage)
    text = write_mindformers_recipe(load_recipe(recipe, overrides or []), family, devices, output, force)
    print(text if output is None else f"written: {output}", end="\n" if output else "")


@app.command("schema")
def schema_command() -> None:
    """Print the JSON schema of a recipe, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


if __name__ == "__main__":
    sys.exit(main())
