"""The console script `budgetdraft`. Each command imports the heavy libraries it needs, so `--help` is quick."""

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bdcore.config import ConfigError, load_config
from bdcore.workspace import Workspace, default_root, locate_config

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train one speculative-decoding drafter that holds its acceptance at any sparse-KV budget, and measure it.",
    epilog="Everything lies in one workspace folder: BUDGETDRAFT_HOME, default `workspace/` of the checkout.",
)
# A pipe or a log wants whole table rows; a terminal knows its own width.
console = Console(width=None if sys.stdout.isatty() else 120)
errors = Console(stderr=True)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, such as configs/quick.yaml")]
SetOption = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as grid.gammas=[2,4]; may be repeated"),
]
LimitOption = Annotated[int | None, typer.Option(help="Prompts per context at most; for trying things out")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """User errors end in one line and exit code 2; a flow that failed ends in one line and exit code 1."""
    told = logging.StreamHandler(sys.stderr)  # what the reading of rows has to say, such as a damaged file
    logging.getLogger("reports").addHandler(told)
    try:
        yield
    except (ConfigError, FileNotFoundError) as error:
        _fail(str(error), 2)
    except ValueError as error:
        _fail(str(error), 2)
    finally:
        logging.getLogger("reports").removeHandler(told)


def _fail(message: str, code: int) -> NoReturn:
    # Escaped: `budgets = [full]` in a message is no markup.
    line = escape(" ".join(message.split()))
    errors.print(f"[red]error:[/red] {line}", highlight=False, soft_wrap=True, emoji=False)
    raise typer.Exit(code)


def _workspace() -> Workspace:
    return Workspace(default_root())


def _prefect_settings(workspace: Workspace) -> None:
    """Before Prefect is imported: everything it keeps lies in the workspace, and it talks to nobody."""
    workspace.prefect_home.mkdir(parents=True, exist_ok=True)  # Prefect does not make parent folders
    os.environ.setdefault("PREFECT_HOME", str(workspace.prefect_home))
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # The temporary server's first start migrates its database: slow on small machines.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO")


STAGES = ("pipeline", "targets", "training", "evaluation", "reporting")
ROLES = ("trained", "base")
DTYPES = ("float32", "bfloat16")
WEIGHTS = ("best", "last")


@app.command()
def run(
    config: ConfigArgument,
    overrides: SetOption = [],  # noqa: B006 - typer reads it, nobody changes it
    limit: LimitOption = None,
    stage: Annotated[str, typer.Option(help=f"One stage alone: {', '.join(STAGES[1:])}")] = "pipeline",
) -> None:
    """Run the main job: targets, training, evaluation, report. Reuses what is done; a killed run goes on."""
    with one_line_errors():
        if stage not in STAGES:
            raise ConfigError(f"--stage {stage}: one of {', '.join(STAGES)}")
        from bdcore.study import open_study

        path = str(locate_config(config))
        # Checked here first, so that a mistake costs seconds and not the start of a server.
        study = open_study(path, overrides, limit)
        console.print(f"[bold]{study.config.name}[/bold]: {study.runtime.reason}", highlight=False)
        console.print(f"workspace {study.workspace.root}", highlight=False, soft_wrap=True)
        _check_tokens(study)
        _prefect_settings(study.workspace)
        console.print("starting Prefect (a temporary server, unless PREFECT_API_URL is set)", highlight=False)
        code = _run_flow(stage, path, overrides, limit)
        if stage in ("pipeline", "evaluation", "reporting") and study.workspace.samples(study.keys.run).is_dir():
            _summary(study)
        raise typer.Exit(code)


def _check_tokens(study: Any) -> None:
    from bdcore.models.loading import load_tokenizer, materialise, quiet
    from bdcore.preflight import check_tokens

    console.print("checking documents and tokenizer (the embedded verifier is converted once, half a minute)")
    with quiet():
        source = materialise(study.config.verifier, study.workspace.models)
        check_tokens(study.config, study.inputs, load_tokenizer(source, study.config.verifier.revision))


def _run_flow(stage: str, config: str, overrides: list[str], limit: int | None) -> int:
    from importlib import import_module

    flow: Any = getattr(import_module(f"flows.{stage}"), stage)
    try:
        state = flow(config, overrides, limit, return_state=True)
    except Exception as error:  # a flow's own errors are states: this is Prefect that cannot be reached or started
        api = os.environ.get("PREFECT_API_URL")
        remedy = f"; is the server of PREFECT_API_URL = {api} up?" if api else ""
        _fail(f"Prefect: {type(error).__name__}: {error}{remedy}", 1)
    if state.is_completed():
        return 0
    reason = escape(str(state.message))
    errors.print(f"[red]{stage} did not complete:[/red] {reason}", highlight=False, soft_wrap=True, emoji=False)
    return 1


def _summary(study: Any) -> None:
    from reports.measured import summary_rows

    console.print(_cells(study.config.name, summary_rows(study.workspace.root, study.keys.run)))
    root = study.workspace.root
    report = study.workspace.report(study.keys.run) / "report.html"
    plain = "select method, context, budget, round(acceptance, 3) as acceptance from cells order by all"
    console.print("\nLook at:", highlight=False)
    console.print(f"  report   {report}", highlight=False, soft_wrap=True)
    console.print(
        f"  runs     {_bin('mlflow')} ui --backend-store-uri {_mlflow_uri(root)}", highlight=False, soft_wrap=True
    )
    console.print(f'  rows     {_bin("budgetdraft")} query "{plain}"', highlight=False, soft_wrap=True)


def _cells(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per cell; what the grid has several of besides is named in a column of its own."""
    table = Table(title=f"{name}: acceptance = accepted / drafted, 95 % intervals over prompts")
    several = any(row["setting"] for row in rows)
    for column in ("method", *(["setting"] if several else [])):
        table.add_column(column, no_wrap=column == "method")
    for column in ("context", "budget", "gamma", "acceptance", "tokens/round", "decode speedup", "equal to ar"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"],
            *([row["setting"]] if several else []),
            str(row["context"]),
            "full" if row["budget"] == -1 else str(row["budget"]),
            str(row["gamma"]),
            _interval(row),
            _number(row["tokens_per_round"], "{:.2f}"),
            _number(row["decode_speedup"], "{:.2f}x"),
            row["exact"] + (f" ({row['failed']} failed)" if row["failed"] else ""),
        )
    return table


def _bin(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _mlflow_uri(root: Path) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"


def _interval(row: dict[str, Any]) -> str:
    if row["acceptance"] is None:
        return "-"
    text = f"{row['acceptance']:.1%}"
    return text if row["lo"] is None else f"{text} [{row['lo']:.1%}, {row['hi']:.1%}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@app.command()
def plan(config: ConfigArgument, overrides: SetOption = [], limit: LimitOption = None) -> None:  # noqa: B006
    """Say what would run: stages with their keys, cells, estimated memory and time. Executes nothing."""
    with one_line_errors():
        from flows.planning import describe

        loaded = load_config(locate_config(config), overrides, limit=limit)
        for line in describe(loaded, _workspace()):
            console.print(line, highlight=False, soft_wrap=True, markup=False)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; or give --file")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file")] = None,
    config: Annotated[str, typer.Option(help="The study whose verifier and drafter to use")] = "configs/quick.yaml",
    overrides: SetOption = [],  # noqa: B006
    drafter: Annotated[str, typer.Option(help="`trained`, `base`, `none`, or a drafter's folder")] = "trained",
    budget: Annotated[str, typer.Option(help="Keys the drafter may cache, memory such as 2MiB, or `full`")] = "full",
    gamma: Annotated[int, typer.Option(min=1, help="Tokens drafted per round, at most")] = 4,
    gamma_mode: Annotated[
        str | None,
        typer.Option(help="`fixed`, `confidence` or `adaptive` draft length (default: the study's grid.gamma_mode)"),
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens to generate at most")] = 64,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; else sampled from the verifier's distribution")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k most probable tokens; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens that reach this together")] = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens already there become less likely")] = 1.0,
    min_new_tokens: Annotated[int, typer.Option(help="No end of text before this many tokens")] = 0,
    stop: Annotated[list[str], typer.Option(help="Stop after this text; may be repeated")] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling")] = 0,
    compare: Annotated[
        bool, typer.Option(help="Also run the verifier alone, check equality, print the speedup")
    ] = True,
) -> None:
    """Generate from one prompt: streams text, then acceptance, speed and equality with the verifier alone."""
    with one_line_errors():
        if (prompt is None) == (file is None):
            raise ConfigError("give one prompt, as an argument or with --file PATH")
        if file is not None and not file.is_file():
            raise ConfigError(f"--file {file.resolve()}: no such file")
        from bdcore.decoding.sampling import Sampling
        from flows.generation import generate_text

        text = prompt if prompt is not None else file.read_text()  # type: ignore[union-attr]
        generate_text(
            text,
            config,
            overrides,
            console,
            drafter=drafter,
            budget=budget,
            rule=(gamma_mode, gamma),
            new_tokens=new_tokens,
            sampling=Sampling(temperature, top_k, top_p, repetition_penalty, min_new_tokens),
            stop=stop,
            seed=seed,
            compare=compare,
        )


@app.command()
def query(
    sql: Annotated[str, typer.Argument(help='One SELECT, such as "select * from frontier"')],
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON")] = False,
) -> None:
    """Ask the workspace's tables: samples, rounds, targets, cells, speedups, frontier, positions, paper_table_1..3.

    docs/queries.md has ten questions with their queries. A damaged file is left out and named on stderr;
    `select * from skipped_files` lists them.
    """
    with one_line_errors():
        from reports.tables import query as ask

        columns, rows = ask(default_root(), sql)
        if as_json:
            print(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], default=str))
            return
        table = Table()
        for column in columns:
            table.add_column(Text(column), overflow="fold")
        for row in rows:
            values = ("NULL" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row)
            table.add_row(*map(Text, values))  # Text, since `[...]` in an output is no markup
        # A pipe wants whole lines, not a terminal's width.
        out = console if console.is_terminal else Console(width=max(80, 24 * len(columns)))
        out.print(table)


@app.command()
def report(config: ConfigArgument, overrides: SetOption = [], limit: LimitOption = None) -> None:  # noqa: B006
    """Make the report of what has been measured so far, whole or in part."""
    run(config, overrides, limit, stage="reporting")


@app.command()
def export(
    config: ConfigArgument,
    to: Annotated[Path, typer.Option(help="Folder to write; new or empty")],
    overrides: SetOption = [],  # noqa: B006
    role: Annotated[str, typer.Option(help="`trained`, or `base`: the drafter before the sparse views")] = "trained",
    dtype: Annotated[str, typer.Option(help="Of the weights: `float32`, or `bfloat16` at half the size")] = "float32",
    weights: Annotated[
        str | None,
        typer.Option(help="`best` of the validations, or `last` (default: those the study keeps, `validation.keep`)"),
    ] = None,
) -> None:
    """Write a trained drafter as a plain Hugging Face folder with a model card.

    `AutoModelForCausalLM.from_pretrained(DIR)` loads it. It drafts in
    `verifier.generate(..., assistant_model=drafter)` of transformers, and in
    `budgetdraft generate --drafter DIR --budget 256`, with a budget.

    Its README.md says how it was trained and what was measured with it;
    drafter.json keeps the ids of a pruned head.

    Example: budgetdraft export configs/quick.yaml --to my-drafter
    """
    with one_line_errors():
        options = (("role", role, ROLES), ("dtype", dtype, DTYPES), ("weights", weights, (None, *WEIGHTS)))
        for name, value, legal in options:
            if value not in legal:
                raise ConfigError(f"--{name} {value}: one of {', '.join(filter(None, legal))}")
        from flows.exporting import export_folder

        out = export_folder(config, overrides, to=to, role=role, dtype=dtype, weights=weights)
        console.print(f"{role} drafter, {dtype}: {out}", highlight=False, soft_wrap=True, markup=False)
        console.print(f"model card: {out / 'README.md'}", highlight=False, soft_wrap=True, markup=False)


@app.command()
def envelope(
    out: Annotated[Path, typer.Option(help="Folder for the tables and figures; files of the same names are replaced")],
    workspace: Annotated[
        Path | None, typer.Option(help="Workspace to read (default: BUDGETDRAFT_HOME, else that of the checkout)")
    ] = None,
    against: Annotated[
        list[str],
        typer.Option(help="Compare each drafter with this one only, such as `base`; may be repeated (default: all)"),
    ] = [],  # noqa: B006
    drafter: Annotated[
        str | None, typer.Option(help="Judge this drafter against the better of the references, cell by cell")
    ] = None,
    reference: Annotated[
        list[str], typer.Option(help="A drafter that --drafter is judged against; may be repeated")
    ] = [],  # noqa: B006
) -> None:
    """Compare the drafters of all studies in a workspace: tables (CSV) and figures (SVG) over context and budget.

    A trained drafter is called by its study, the untrained one `base`,
    prompt lookup `ngram`. Where a name stands for several drafters, `@` and
    the start of a run's key follow. Intervals: 95 %, bootstrap over documents.

    envelope.csv: acceptance, speedup and repetition of every drafter in every
    cell (budget -1 is the full cache).

    compare.csv: difference in acceptance of two drafters on the same
    documents.

    retention.csv: acceptance at each context, relative to the shortest one,
    on the same documents.

    growth.csv: what the validations of every training stage found, against
    tokens learned from.

    upper_envelope.csv, with --drafter and --reference: is the drafter at
    least as good as the better of the references, within the intervals?

    Example: budgetdraft envelope --out out --drafter multi --reference base
    """
    with one_line_errors():
        if (drafter is None) != (not reference):
            raise ConfigError("--drafter and --reference go together: name one drafter and at least one reference")
        from reports.across import write_envelope

        root = workspace.expanduser().resolve() if workspace else default_root()
        judged = (drafter, reference) if drafter else None
        for path in write_envelope(root, out.expanduser().resolve(), against=against, judged=judged):
            console.print(str(path), highlight=False, soft_wrap=True, markup=False)


@app.command()
def recommend(
    context: Annotated[int, typer.Option(min=1, help="Prompt length in tokens")],
    memory: Annotated[str, typer.Option(help="For the drafter's caches of all sequences, such as 512MiB")] = "1GiB",
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once")] = 1,
    config: Annotated[str | None, typer.Option(help="Rows of this study only (default: the whole workspace)")] = None,
    overrides: SetOption = [],  # noqa: B006
    run_key: Annotated[str | None, typer.Option("--run", help="Rows of the run of this key only")] = None,
    corpus: Annotated[str | None, typer.Option(help="Judge by this corpus alone (default: by the worst)")] = None,
    workload: Annotated[str | None, typer.Option(help="Judge by `greedy` or `sampled` alone")] = None,
    temperature: Annotated[float | None, typer.Option(help="Judge by this temperature alone; 0 is greedy")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON")] = False,
) -> None:
    """Say which budget, draft length and policy to deploy at a context, or to leave speculation off.

    Rests on what was timed in this workspace (workloads greedy and sampled):
    the setting with the highest lower end of its speedup's interval, among
    those whose cache fits. Each is judged by its worst corpus, workload and
    temperature, unless you name one. Ends with the flags for vLLM and SGLang,
    and what of the setting they cannot do.

    Example: budgetdraft recommend --memory 2GiB --context 8192 --batch 1
    """
    with one_line_errors():
        if config and run_key:
            raise ConfigError("--config and --run: each names a run; give one of them")
        from bdcore.study import open_study
        from reports.deployment import as_json as to_json
        from reports.deployment import as_text, recommended

        found = recommended(
            default_root(),
            context=context,
            memory=_bytes(memory),
            batch=batch,
            run_key=open_study(config, overrides).keys.run if config else run_key,
            corpus=corpus,
            workload=workload,
            temperature=temperature,
        )
        print(to_json(found) if as_json else as_text(found))


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"--memory {text}: give a size such as 512MiB or 2GiB") from error


@app.command()
def doctor(config: Annotated[str, typer.Argument(help="A study to check too")] = "configs/quick.yaml") -> None:
    """Check the environment, the models and the workspace, and say what to do."""
    from flows.diagnosis import examine

    workspace = _workspace()
    with suppress(OSError):  # a folder that cannot be written is one of the findings
        _prefect_settings(workspace)
    healthy = True
    for item in examine(config, workspace):
        healthy &= item.ok
        mark = "[green]ok  [/green]" if item.ok else "[red]FAIL[/red]"
        console.print(f"{mark} {escape(item.what)}", highlight=False, soft_wrap=True, emoji=False)
        if item.remedy:
            console.print(f"     -> {item.remedy}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(0 if healthy else 1)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
