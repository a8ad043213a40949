"""`ckpt-tools`: look into checkpoints, convert them, and prove that nothing changed.

    ckpt-tools inspect output/quickstart/varlen
    ckpt-tools convert --to padded output/quickstart/varlen output/quickstart/padded

Exit status 0 only when all is well; 1 for a fault that the message explains, 2 for a wrong command line. Tables and
logs are for people; with `--json` one object goes to stdout and nothing else. Sources are only read; a destination is
written whole or not at all, and never over something.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ckpt_tools.new_folder import without_dots
from ms_varlen.console import Json, debug_option, people, print_columns, print_table, run_app
from ms_varlen.modes import Mode

HELP = """Look into checkpoints, convert them between modes and frameworks, and prove that nothing changed.

\b
ckpt-tools inspect output/quickstart/varlen
ckpt-tools convert --to padded output/quickstart/varlen output/quickstart/padded
ckpt-tools verify output/quickstart/varlen output/quickstart/padded
ckpt-tools export-hf output/quickstart/varlen exported

Exit status 0 only when all is well, 1 for a fault that the message explains, 2 for a wrong command line.
"""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)
app.callback()(debug_option)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint to read; it stays as it is.")]
Destination = Annotated[
    Path, typer.Argument(metavar="DST", help="Folder to make; it must not exist.", callback=without_dots)
]
Config = Annotated[
    Path | None,
    typer.Option(help="Model of a MindFormers checkpoint or plain file: its YAML, a config.json, or a recipe."),
]
Rows = Literal["interleaved", "contiguous"]
QkvRows = Annotated[
    Rows | None, typer.Option("--qkv", help="Rows of MindFormers' fused q, k, v; by default as --config says.")
]
MlpRows = Annotated[
    Rows | None, typer.Option("--mlp", help="Rows of MindFormers' fused gate and up; by default as --config says.")
]
Strategy = Annotated[
    Path | None, typer.Option(help="Strategy file of a training over ranks, or a folder with one for each stage.")
]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    return run_app(app, "ckpt-tools", argv)


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or folder that some framework wrote.")],
    config: Config = None,
    strategy: Strategy = None,
    qkv: QkvRows = None,
    mlp: MlpRows = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint is, what it holds, and what is missing or altered; exit status 1 when something is."""
    from ckpt_tools.inspect import inspect
    from ckpt_tools.open_any import ReadingHints

    with _bar("checking") as tell:
        result = inspect(path, ReadingHints(config, qkv, mlp, strategy), tell)
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        rows = result.pop("parameters")
        table = [[row["name"], row["dtype"], str(row["shape"])] for row in rows]
        print_columns("parameters", ["name", "dtype", "shape"], table, [], wide=True)
        faults = result.pop("faults")
        print_table("checkpoint", {"parameters": len(rows), **result})
        for fault in faults:
            people.print(f"fault: {fault}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if result["complete"] else 1)


@app.command("convert")
def convert_command(
    source: Source,
    destination: Destination,
    mode: Annotated[Mode, typer.Option("--to", help="Mode of the new checkpoint.")],
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe to resume with; by default the source's, its sizes translated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a run folder of another mode that `ms-varlen train` resumes, with each sample of the epoch once."""
    from ckpt_tools.convert import convert

    with _bar("writing") as tell:
        result = convert(source, destination, mode, recipe, tell)
    _show("converted", result, as_json)


@app.command("verify")
def verify_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint of any kind.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    recipe: Annotated[
        Path | None, typer.Option(help="Compare the loss on its samples too, each side in its own mode's layout.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Steps of the recipe's plan to compute the loss on.")] = 4,
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Leave optimizer moments out; else both sides must have them, or none."),
    ] = False,
    config: Config = None,
    qkv: QkvRows = None,
    mlp: MlpRows = None,
    strategy: Strategy = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints, parameter by parameter; exit status 1 when a value differs or a loss by over 2e-5."""
    from ckpt_tools.open_any import ReadingHints
    from ckpt_tools.verify import verify
    from ms_varlen.recipe.recipe import load_recipe

    loaded = load_recipe(recipe) if recipe else None
    with _bar("comparing", bytes_=False) as tell:
        hints = ReadingHints(config, qkv, mlp, strategy)
        result = verify(first, second, hints, loaded, batches, tell, weights_only)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        rows = [[row.name, row.a, row.b, _number(row.max_abs_diff)] for row in result.differences]
        if rows:
            print_columns("differences", ["parameter", "A", "B", "max abs diff"], rows, [], wide=True)
        table = {key: value for key, value in result.to_json().items() if key != "differences"}
        print_table("equal" if result.passed else "NOT equal", table)
        if result.optimizer_only_in:
            side = result.optimizer_only_in.upper()
            people.print(
                f"only {side} has optimizer moments; --weights-only leaves them out", style="red", markup=False
            )
    raise typer.Exit(0 if result.passed else 1)


@app.command("import-hf")
def import_hf_command(source: Source, destination: Destination, as_json: Json = False) -> None:
    """Make a checkpoint of ours from a Hugging Face folder, which `model.init_from` takes as well, or a GGUF file."""
    from ckpt_tools.imports import import_weights
    from ckpt_tools.open_any import open_weights

    with _bar("writing") as tell:
        result = import_weights(open_weights(source), destination, tell)
    _show("imported", result, as_json)


@app.command("export-hf")
def export_hf_command(
    source: Source,
    destination: Destination,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="dtype of the files; by default that of what was imported, else fp32."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Most bytes of a file, as 5GB, 200MB or 50KB.")] = "5GB",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer's files, or tokenizer.json, to carry along.")
    ] = None,
    config: Config = None,
    qkv: QkvRows = None,
    mlp: MlpRows = None,
    strategy: Strategy = None,
    as_json: Json = False,
) -> None:
    """Make a folder that transformers loads, from a checkpoint of any kind."""
    from ckpt_tools.huggingface import DTYPES, export_hugging_face, size_in_bytes
    from ckpt_tools.open_any import ReadingHints, open_weights, positions_of, stored_dtype, tokenizer_of

    most = size_in_bytes(max_shard_size)
    weights = open_weights(source, ReadingHints(config, qkv, mlp, strategy))
    with _bar("writing") as tell:
        result = export_hugging_face(
            weights,
            destination,
            DTYPES[dtype] if dtype else stored_dtype(weights),
            most,
            tokenizer or tokenizer_of(weights),
            positions_of(weights),
            tell,
        )
    _show("exported", result, as_json)


@app.command("import-gguf")
def import_gguf_command(
    source: Source,
    destination: Destination,
    tokenizer: Annotated[bool, typer.Option(help="Write the tokenizer too.")] = True,
    as_json: Json = False,
) -> None:
    """Make a Hugging Face folder from a GGUF file: fp32 weights, config.json and the tokenizer."""
    from ckpt_tools.gguf import import_gguf

    with _bar("writing") as tell:
        result = import_gguf(source, destination, tokenizer, tell)
    _show("imported", result, as_json)


@app.command("import-mindformers")
def import_mindformers_command(
    source: Source,
    destination: Destination,
    config: Config = None,
    qkv: QkvRows = None,
    mlp: MlpRows = None,
    strategy: Strategy = None,
    as_json: Json = False,
) -> None:
    """Make a checkpoint of ours from one of MindFormers: weights, and moments where it has them."""
    from ckpt_tools.imports import import_weights
    from ckpt_tools.mindformers.checkpoints import open_mindformers

    with _bar("writing") as tell:
        weights = open_mindformers(source, config, qkv, mlp, strategy)
        result = import_weights(weights, destination, tell)
    _show("imported", result, as_json)


@app.command("export-mindformers")
def export_mindformers_command(
    source: Source,
    destination: Destination,
    model: Annotated[
        Literal["llama", "qwen3"] | None,
        typer.Option(help="LlamaForCausalLM (legacy) or Qwen3ForCausalLM (mcore); by default as the family needs."),
    ] = None,
    files: Annotated[
        Literal["legacy", "new"] | None, typer.Option(help="Folder layout; by default the model's own.")
    ] = None,
    fused: Annotated[bool, typer.Option(help="One weight for q, k, v and one for gate, up (qkv_concat).")] = False,
    qkv: Annotated[Rows, typer.Option("--qkv", help="Rows of fused q, k, v.")] = "interleaved",
    mlp: Annotated[Rows, typer.Option("--mlp", help="Rows of fused gate and up.")] = "interleaved",
    as_json: Json = False,
) -> None:
    """Make a checkpoint that MindFormers loads, from one of ours or a Hugging Face folder, moments included."""
    from ckpt_tools.mindformers.checkpoints import export_mindformers
    from ckpt_tools.open_any import open_weights, positions_of

    weights = open_weights(source)
    with _bar("writing") as tell:
        result = export_mindformers(weights, destination, model, files, fused, qkv, mlp, positions_of(weights), tell)
    _show("exported", result, as_json)


@contextlib.contextmanager
def _bar(what: str, bytes_: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; none where it is no terminal."""
    size = DownloadColumn() if bytes_ else TextColumn("{task.completed}/{task.total}")
    columns = (TextColumn("{task.description}"), BarColumn(), size, TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=people, disable=not people.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _show(title: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        print_table(title, result)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
