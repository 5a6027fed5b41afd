"""Builds the report of one run: one HTML file that needs nothing else, the same in Markdown, tables and figures."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import duckdb

from reports.files import write_text
from reports.tables import read


def build_report(workspace: Path, run_key: str, out: Path, *, facts: Mapping[str, Any]) -> dict[str, Path]:
    """Write the report of `run_key` into `out`. Returns path by name: `report.html`, `tables/cells.csv`, ...

    `facts` adds what rows cannot know: `study` (name), `expected_samples` (count), `training` (drafter name -> logged
    steps with step, loss_a, loss_c), `planned` (cells of the grid: settings and `prompts`), `answers` (document -> what
    the needle says that it asks for), `texts` (`tokens` wanted of a document, and `too_short`: corpus -> documents that
    had fewer), `paper` (show its numbers whatever was measured); everything else in it is shown as definition tables.
    """

    def made(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
        from reports.pages import pages

        return pages(connection, run_key, facts)

    files = read(workspace, made, run_key=run_key, beside=lambda: import_module("reports.pages"))
    return {name: write_text(out / name, text) for name, text in files.items()}
