"""The rows of a workspace as SQL views, and read-only queries over them. Nothing here changes a row."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import duckdb
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bdcore.identity import atomic_path
from bdcore.schema import ROUNDS, SAMPLES, TARGETS
from reports.parts import GLOBS, Parts, absolute_glob, find, runs
from reports.printed import numbers

SCHEMAS = {"targets": TARGETS, "rounds": ROUNDS, "samples": SAMPLES}

CELL_KEYS = (
    "run_key",
    "method",
    "drafter_name",
    "drafter_key",
    "corpus",
    "workload",
    "temperature",
    "context",
    "budget",
    "policy",
    "position_mode",
    "gamma",
    "gamma_mode",
    "refresh",
)
"""What must be equal before two sample rows may be added up."""

# What no report adds up: texts and lists, which are most of a run's bytes, and what is the same in all its rows.
_LEFT_OUT = {
    *("output_text", "output_ids", "accepted_spans", "accepted_at", "drafted_at"),
    *("seed", "prompt_len", "finish_reason", "mismatch_gap", "mismatch_steps", "device", "dtype"),
}
_VANISHED = 10
"""How many times files may be removed under a reader before that counts as an error."""

_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
}

T = TypeVar("T")
_log = logging.getLogger(__name__)


def render_views(workspace: Path) -> str:
    """SQL of the views whose files exist, with absolute globs: it works from any folder, also in the duckdb CLI."""
    root = workspace.expanduser().resolve()
    # An empty glob is an error in DuckDB, so a view without files is left out.
    found = [name for name, pattern in GLOBS.items() if next(root.glob(pattern), None) is not None]
    return _render({name: [absolute_glob(root, name)] for name in found})


def _render(sources: Mapping[str, Sequence[str]], *, kept: bool = False) -> str:
    """SQL over files or globs by table. `kept`: what a report asks for again and again becomes a table in memory."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=False
    )
    environment.filters["literal"] = _literal
    return environment.get_template("views.sql.j2").render(
        source=sources,
        columns={name: [(field.name, _sql_type(field.type)) for field in SCHEMAS[name]] for name in sources},
        kept="TABLE" if kept else "VIEW",
        light=[name for name in SAMPLES.names if name not in _LEFT_OUT],
        cell_keys=CELL_KEYS,
        paper=numbers(),
    )


def _literal(value: Any) -> str:
    """A value as SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list | tuple) else repr(value)


def _sql_type(kind: pa.DataType) -> str:
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _TYPES[kind]


def write_views(workspace: Path) -> Path:
    """Write `views.sql` into the workspace, atomically. Returns its path."""
    path = workspace / "views.sql"
    with atomic_path(path) as partial:
        partial.write_text(render_views(workspace))
    return path


def read(
    workspace: Path,
    work: Callable[[duckdb.DuckDBPyConnection], T],
    *,
    run_key: str | None = None,
    beside: Callable[[], object] | None = None,
) -> T:
    """What `work` makes of the rows of a workspace, or of one run (then `samples` has `filename` and
    `file_row_number`, and lacks `_LEFT_OUT`).

    A damaged file is left out, named in the log and in the table `skipped_files`. Where one proves damaged on the way,
    or is removed under the reader, `work` begins again, so it must do nothing but read. `beside` runs in a thread while
    DuckDB opens the files, which takes seconds where they are thousands: a place to import what `work` needs.
    FileNotFoundError without results, ValueError when none can be read.
    """
    left_out: dict[Path, str] = {}
    patience = _VANISHED
    while True:
        parts = find(workspace, run_key, left_out)
        if beside is not None:
            Thread(target=beside).start()
        try:
            with connect(parts, run_key) as connection:
                result = work(connection)
        except duckdb.Error as error:
            culprit = parts.named_in(str(error)) or unreadable(parts)
            if culprit is None or culprit in left_out:
                raise
            if culprit.exists():
                left_out[culprit] = one_line(error)
            elif patience := patience - 1:  # removed, not damaged: look again
                continue
            else:
                raise
        else:
            for path, reason in parts.skipped.items():
                _log.warning("%s is left out: %s", path, reason)
            return result


def unreadable(parts: Parts) -> Path | None:
    """The first file whose rows cannot be read, where DuckDB's error names none."""
    with duckdb.connect() as connection:
        for path in (path for paths in parts.files.values() for path in paths):
            try:
                connection.execute("SELECT count(COLUMNS(*)) FROM read_parquet(?)", [path.as_posix()])
            except duckdb.Error:
                return path
    return None


def connect(parts: Parts, run_key: str | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with the views over the files found, and `skipped_files` (file, reason)."""
    _require(parts, run_key)
    connection = duckdb.connect()
    try:
        # A file that is replaced must be read anew.
        connection.execute("SET enable_external_file_cache = false")
        # After two seconds DuckDB would draw its bar into what this process prints.
        connection.execute("SET enable_progress_bar = false")
        connection.execute("CREATE TABLE skipped_files (file VARCHAR, reason VARCHAR)")
        for path, reason in parts.skipped.items():
            connection.execute("INSERT INTO skipped_files VALUES (?, ?)", [parts.label(path), reason])
        connection.execute(_render(parts.sources, kept=run_key is not None))
    except BaseException:
        connection.close()
        raise
    return connection


def _require(parts: Parts, run_key: str | None) -> None:
    if "samples" in parts.files:
        return
    for path, reason in parts.skipped.items():
        raise ValueError(f"results in {parts.root} cannot be read: {parts.label(path)}: {reason}; a rerun rebuilds it")
    found = runs(parts.root)
    if run_key is None or not found:
        raise FileNotFoundError(f"no results in {parts.root}: run `budgetdraft run` first, or name another workspace")
    raise FileNotFoundError(f"run_key = {run_key}: no results in {parts.root}; found {', '.join(found)}")


def query(workspace: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one read-only statement. Any fault is a ValueError of one line."""

    def ask(connection: duckdb.DuckDBPyConnection) -> tuple[list[str], list[tuple[Any, ...]]]:
        statements = connection.extract_statements(sql)
        if len(statements) != 1:
            raise ValueError(f"query: give exactly one statement, found {len(statements)}")
        kind = statements[0].type
        if kind is not duckdb.StatementType.SELECT:
            raise ValueError(f"query: only SELECT, DESCRIBE, SHOW and SUMMARIZE are legal, found {kind.name}")
        return fetch(connection, sql)

    try:
        return read(workspace, ask)
    except duckdb.Error as error:
        raise ValueError(f"query: {one_line(error)}") from error


def fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and all rows of one statement."""
    result = connection.execute(sql, list(parameters))
    return [column[0] for column in result.description or []], result.fetchall()


def names_known(connection: duckdb.DuckDBPyConnection) -> set[str]:
    """Tables and views that there are: those of rows without any file are not."""
    return {row["name"] for row in records(connection, "SHOW TABLES")}


def records(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """All rows of one statement as dicts."""
    columns, rows = fetch(connection, sql, parameters)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def arrays(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """`records` with lists as numpy arrays, masked where they hold NULLs: long ones come several times as fast."""
    columns = connection.execute(sql, list(parameters)).fetchnumpy()
    return [dict(zip(columns, row, strict=True)) for row in zip(*(c.tolist() for c in columns.values()), strict=True)]


def one_line(error: duckdb.Error) -> str:
    """DuckDB's message without the copy of the statement it ends with."""
    return " ".join(str(error).split("\n\nLINE ", 1)[0].split())
