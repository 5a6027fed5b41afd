"""The files of one report, as text: HTML, Markdown, tables, figures."""

from collections.abc import Mapping
from typing import Any

import duckdb
from jinja2 import Environment
from markupsafe import Markup, escape

from bdcore.collapse import Estimate
from reports.content import gather
from reports.files import csv_of, csv_text, templates
from reports.measured import Measured, summary
from reports.section import Shown, as_csv
from reports.tables import fetch, names_known

_VIEWS = (
    *("cells", "speedups", "frontier", "positions", "authors_scores"),
    *("paper_table_1", "paper_table_2", "paper_table_3", "paper_figure_3", "paper_comparison"),
)


def pages(connection: duckdb.DuckDBPyConnection, run_key: str, facts: Mapping[str, Any]) -> dict[str, str]:
    """Text by the name of its file: `report.html`, `tables/cells.csv`, ..."""
    content = gather(connection, run_key, facts)
    files = _tables(connection, run_key, content)
    files |= {f"figures/{drawing.name}.svg": drawing.standalone for drawing in content["drawings"]}
    environment = _environment()
    return files | {
        name: environment.get_template(f"{name}.j2").render(content) for name in ("report.html", "report.md")
    }


def _tables(connection: duckdb.DuckDBPyConnection, run_key: str, content: Mapping[str, Any]) -> dict[str, str]:
    rows = summary(content["cells"])
    files = {"tables/summary.csv": csv_of(rows)}
    known = names_known(connection)
    for view in _VIEWS:
        if view in known:
            columns, found = fetch(connection, f"SELECT * FROM {view} WHERE run_key = ? ORDER BY ALL", [run_key])
            if found:
                files[f"tables/{view}.csv"] = csv_text(columns, found)
    for section in content["analysis"]:
        files[f"tables/{section.name}.csv"] = csv_text(*as_csv(section))
    for name in ("collapses", "effects", "failed", "skipped"):
        plain = [row if isinstance(row, dict) else vars(row) for row in content[name]]
        if plain:
            files[f"tables/{name}.csv"] = csv_of(plain)
    return files


def _environment() -> Environment:
    environment = templates(autoescape=True)
    environment.filters |= {
        "fixed": _fixed,
        "percent": lambda value, digits=1: _fixed(None if value is None else 100 * value, digits),
        "mib": lambda value: _fixed(None if value is None else value / 2**20, 2),
        "budget": lambda value: "full" if value < 0 else str(value),
        "interval": _interval,
        # A blank line would end the HTML block in Markdown.
        "preformatted": lambda text: Markup(str(escape(text)).replace("\n", "&#10;")),
        "md": lambda value: " ".join(str(value).split()).replace("|", "\\|"),
    }
    environment.tests |= {"drafting": _drafts, "shown": lambda value: isinstance(value, Shown)}
    return environment


def _drafts(cell: Measured) -> bool:
    return cell.row["gamma"] > 0


def _fixed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(estimate: Estimate, scale: float = 1.0, digits: int = 2) -> str:
    """`[0.55, 0.68]`; in words where there is none, so that a lone figure never looks certain."""
    if estimate.value is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return "[no interval]"
    return f"[{scale * estimate.low:.{digits}f}, {scale * estimate.high:.{digits}f}]"
