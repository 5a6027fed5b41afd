"""`budgetdraft envelope`: tables and figures of all studies of a workspace, written into one folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.curves import all_curves
from reports.envelope import COLUMNS, COMPARED, RETAINED, VERDICTS, compare_all, envelope, retention, upper_envelope
from reports.files import csv_text, write_text
from reports.growth import GROWTH, growth
from reports.studies import documents

Judged = tuple[str, Sequence[str]]


def write_envelope(
    workspace: Path, out: Path, *, against: Sequence[str] = (), judged: Judged | None = None
) -> list[Path]:
    """Write `envelope.csv`, `compare.csv`, `retention.csv`, `growth.csv` and the figures into `out`; with `judged`, a
    drafter and its references, also `upper_envelope.csv`. Returns their paths.

    Raises FileNotFoundError without results, ValueError for an unknown drafter or a place that cannot be written.
    """
    found = documents(workspace)
    rows = envelope(found)
    files = {
        "envelope.csv": _table(COLUMNS, rows),
        "compare.csv": _table(COMPARED, compare_all(found, against)),
        "retention.csv": _table(RETAINED, retention(found)),
        "growth.csv": _table(GROWTH, growth(workspace)),
    }
    if judged:
        files["upper_envelope.csv"] = _table(VERDICTS, upper_envelope(rows, *judged))
    files |= {f"{drawing.name}.svg": drawing.standalone for drawing in all_curves(rows)}
    try:
        return [write_text(out / name, text) for name, text in files.items()]
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); name another folder") from error


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    return csv_text(columns, ([row.get(name) for name in columns] for row in rows))
