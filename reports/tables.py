"""The rows of a workspace as SQL views, and read-only queries over them. Nothing here changes a row."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bdcore.identity import atomic_path
from bdcore.schema import ROUNDS, SAMPLES, TARGETS

# `[!.]`: a folder or file that is still being written has a name with a leading dot.
GLOBS = {
    "targets": "targets/[!.]*/part-*.parquet",
    "rounds": "results/rounds/run_key=*/[!.]*.parquet",
    "samples": "results/samples/run_key=*/[!.]*.parquet",
}
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

_TYPES = {
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
}


def _sql_type(kind: pa.DataType) -> str:
    return f"{_sql_type(kind.value_type)}[]" if pa.types.is_list(kind) else _TYPES[kind]


def render_views(workspace: Path) -> str:
    """SQL of the views whose files exist, with absolute globs: it works from any folder, also in the duckdb CLI."""
    root = workspace.expanduser().resolve()
    # An empty glob is an error in DuckDB, so a view without files is left out.
    found = {name: pattern for name, pattern in GLOBS.items() if next(root.glob(pattern), None) is not None}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=False
    )
    return environment.get_template("views.sql.j2").render(
        source={name: _pattern(root, pattern) for name, pattern in found.items()},
        columns={name: [(field.name, _sql_type(field.type)) for field in SCHEMAS[name]] for name in found},
        cell_keys=CELL_KEYS,
    )


def _pattern(root: Path, pattern: str) -> str:
    """An absolute glob as the inside of a SQL string; a `[` or `'` in the workspace's own name means itself."""
    return f"{glob.escape(root.as_posix())}/{pattern}".replace("'", "''")


def write_views(workspace: Path) -> Path:
    """Write `views.sql` into the workspace, atomically. Returns its path."""
    path = workspace / "views.sql"
    with atomic_path(path) as partial:
        partial.write_text(render_views(workspace))
    return path


def connect(workspace: Path) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with the views. FileNotFoundError without results, ValueError for a broken file."""
    if next(workspace.glob(GLOBS["samples"]), None) is None:
        raise FileNotFoundError(f"no results in {workspace}: run `budgetdraft run` first, or name another workspace")
    connection = duckdb.connect()
    try:
        connection.execute(render_views(workspace))
    except duckdb.Error as error:
        raise ValueError(f"results in {workspace} cannot be read: {_one_line(error)}; a rerun rebuilds them") from error
    return connection


def query(workspace: Path, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows of one read-only statement. Any fault is a ValueError of one line."""
    with connect(workspace) as connection:
        try:
            statements = connection.extract_statements(sql)
            if len(statements) != 1:
                raise ValueError(f"query: give exactly one statement, found {len(statements)}")
            kind = statements[0].type
            if kind is not duckdb.StatementType.SELECT:
                raise ValueError(f"query: only SELECT, DESCRIBE, SHOW and SUMMARIZE are legal, found {kind.name}")
            return fetch(connection, sql)
        except duckdb.Error as error:
            raise ValueError(f"query: {_one_line(error)}") from error


def fetch(
    connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and all rows of one statement."""
    result = connection.execute(sql, list(parameters))
    return [column[0] for column in result.description or []], result.fetchall()


def records(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """All rows of one statement as dicts."""
    columns, rows = fetch(connection, sql, parameters)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _one_line(error: duckdb.Error) -> str:
    """DuckDB's message without the copy of the statement it ends with."""
    return " ".join(str(error).split("\n\nLINE ", 1)[0].split())
