"""How reports become files: templates, CSV text, and writes that never leave half of one."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bdcore.identity import atomic_path


def templates(*, autoescape: bool) -> Environment:
    """The templates of this package; a missing value is an error."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=StrictUndefined,
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV text of rows by name: a column for every name in any of them, in the order in which they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return csv_text(columns, ([row.get(name) for name in columns] for row in rows))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV text; NULL is an empty field."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def write_text(path: Path, text: str) -> Path:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path
