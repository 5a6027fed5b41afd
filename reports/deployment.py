"""A recommended setting from the rows of a workspace, as text and as JSON with the flags of serving engines."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from math import isclose
from pathlib import Path
from typing import Any

import duckdb

from bdcore.collapse.options import Option, Scene, Setting
from bdcore.collapse.recommend import Recommendation, recommend
from reports.engines import engines
from reports.measured import Measured, measure
from reports.tables import read, records
from reports.verifiers import check_one_verifier


def recommended(
    workspace: Path,
    *,
    context: int,
    memory: int,
    batch: int = 1,
    run_key: str | None = None,
    corpus: str | None = None,
    workload: str | None = None,
    temperature: float | None = None,
) -> Recommendation:
    """The setting that the timed rows of a workspace, or of one run, speak for: by the worst of its scenes, or of
    those that are named. ValueError where runs have different verifiers, and for a name that was not timed."""

    def measured(connection: duckdb.DuckDBPyConnection) -> list[Measured]:
        check_one_verifier(workspace, connection)
        found = [row["run_key"] for row in records(connection, "SELECT DISTINCT run_key FROM samples ORDER BY ALL")]
        return [cell for key in found for cell in measure(connection, key)]

    found = list(options(read(workspace, measured, run_key=run_key)))
    for name, value in {"corpus": corpus, "workload": workload, "temperature": temperature}.items():
        found = found if value is None else _named(found, name, value)
    return recommend(found, context=context, memory=memory, batch=batch)


def options(cells: Iterable[Measured]) -> Iterable[Option]:
    """Timed settings that draft."""
    for cell in cells:
        row = cell.row
        if row["gamma"] and row["workload"] != "replay" and cell.decode_speedup.value is not None:
            yield Option(
                _setting(row),
                Scene(row["corpus"], row["workload"], float(f"{row['temperature'] or 0.0:g}")),
                row["context"],
                int(row["drafter_kv_bytes_peak"] or 0),
                int(row["drafter_cached_peak"] or 0),
                cell.decode_speedup,
                cell.acceptance,
                row["run_key"],
            )


def _setting(row: Any) -> Setting:
    return Setting(
        row["method"],
        row["drafter_name"],
        row["budget"],
        row["policy"],
        row["position_mode"],
        row["gamma"],
        row["gamma_mode"],
        row["refresh"] or 0,
        row["drafter_key"],
    )


def _named(found: list[Option], name: str, value: str | float) -> list[Option]:
    """The options whose scene has this value."""

    def has(option: Option) -> bool:
        own = getattr(option.scene, name)
        return own == value if isinstance(value, str) else isclose(own, value, rel_tol=1e-5)

    kept = [option for option in found if has(option)]
    if not kept:
        have = sorted({str(getattr(o.scene, name)) for o in found})
        raise ValueError(f"{name} = {value}: no timed rows of it; found {', '.join(have) or 'none'}")
    return kept


def as_json(found: Recommendation) -> str:
    return json.dumps({**asdict(found), "engines": engines(found)}, indent=2)


def as_text(found: Recommendation) -> str:
    lines = list(found.sentences)
    for engine, what in engines(found).items():
        flags = [f"  {what['flags']}"] if what["flags"] else []
        lines += ["", f"{engine}:", *flags, *(f"  note: {note}" for note in what["notes"])]
    return "\n".join(lines)
