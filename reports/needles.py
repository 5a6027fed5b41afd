"""Needles: acceptance, and answers found, by how far back the evidence stands in the prompt.

What each document asks for is no row's to say: a report is told it, by document, as the fact `answers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from bdcore.collapse import Estimate, ratios_of_sums
from reports.labels import drafters
from reports.tables import CELL_KEYS, records

QUARTERS = 4
_LISTED = ("accepted", "drafted", "found")

_FILES = "SELECT DISTINCT filename FROM samples WHERE run_key = ? AND evidence_distance IS NOT NULL AND status = 'ok'"
# Whether a text contains the answer, as RULER scores it. Texts are no part of `samples`: they are most of its bytes.
_FOUND = """
SELECT filename, file_row_number, contains(output_text, answer)::INTEGER AS found
FROM read_parquet($2, filename = true, file_row_number = true, hive_partitioning = false)
  JOIN (SELECT unnest($3::VARCHAR[]) AS doc_id, unnest($4::VARCHAR[]) AS answer) USING (doc_id)
"""
_BY_QUARTER = f"""
WITH found AS ({_FOUND}), needles AS (
  SELECT s.*, f.found, least({QUARTERS - 1}, evidence_distance * {QUARTERS} // context) AS quarter
  FROM samples s LEFT JOIN found f USING (filename, file_row_number)
  WHERE s.run_key = $1 AND s.status = 'ok' AND s.evidence_distance IS NOT NULL
)
SELECT {", ".join(CELL_KEYS)}, quarter, min(evidence_distance) AS nearest, max(evidence_distance) AS farthest,
  {", ".join(f"list({name} ORDER BY doc_id) AS {name}" for name in _LISTED)}
FROM needles GROUP BY ALL ORDER BY ALL
"""


@dataclass(frozen=True)
class Reach:
    """The prompts of a cell whose needle stands about so far back."""

    quarter: int | None
    """Of the prompt, 0 the newest; None: wherever it stands."""
    nearest: int
    """Distances in tokens."""
    farthest: int
    acceptance: Estimate
    """Over the whole text that follows, of which the answer is the beginning."""
    found: Estimate
    """Share of the texts that contain the answer."""

    @property
    def label(self) -> str:
        """Its distance in % of the prompt."""
        if self.quarter is None:
            return "any"
        return f"{100 * self.quarter // QUARTERS} to {100 * (self.quarter + 1) // QUARTERS}"


@dataclass(frozen=True)
class Needles:
    """One cell on prompts that ask for a needle."""

    name: str
    """Of the drafter: `reports.labels.drafters`."""
    corpus: str
    workload: str
    context: int
    budget: int
    policy: str
    position_mode: str
    gamma: int
    reaches: list[Reach]
    """By quarter, then all of them together where they are several."""


def needles(connection: duckdb.DuckDBPyConnection, run_key: str, answers: Mapping[str, str]) -> list[Needles]:
    """Empty where no prompt asks for one. `answers`: document -> what its needle says."""
    files = [row["filename"] for row in records(connection, _FILES, [run_key])]
    if not files:
        return []
    told = [run_key, files, list(answers), list(answers.values())]
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records(connection, _BY_QUARTER, told):
        cells.setdefault(tuple(row[key] for key in CELL_KEYS), []).append(row)
    first = [rows[0] for rows in cells.values()]
    shown = ("corpus", "workload", "context", "budget", "policy", "position_mode", "gamma")
    return [
        Needles(name, *(rows[0][key] for key in shown), _reaches(rows))
        for name, rows in zip(drafters(first), cells.values(), strict=True)
    ]


def _reaches(rows: Sequence[Mapping[str, Any]]) -> list[Reach]:
    groups = [[row] for row in rows] + ([list(rows)] if len(rows) > 1 else [])
    columns = [{name: [v for row in group for v in row[name]] for name in _LISTED} for group in groups]
    accepted = ratios_of_sums([(c["accepted"], c["drafted"]) for c in columns])
    found = ratios_of_sums([(c["found"], [1] * len(c["found"])) for c in columns])
    return [
        Reach(
            group[0]["quarter"] if len(group) == 1 else None,
            min(row["nearest"] for row in group),
            max(row["farthest"] for row in group),
            *estimates,
        )
        for group, *estimates in zip(groups, accepted, found, strict=True)
    ]
