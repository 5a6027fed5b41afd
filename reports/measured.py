"""The cells of one run with their intervals: the one place where rows meet statistics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from bdcore.collapse import Cell, Estimate, ratios_of_sums
from reports.labels import VARIANT, label, varying
from reports.series import SCENE
from reports.tables import CELL_KEYS, arrays, read, records

_RATIOS = (
    ("accepted", "drafted"),
    ("sound_accepted", "sound_drafted"),
    ("far_accepted", "far_rounds"),
    ("ar_decode_s", "decode_s"),
    ("ar_wall_s", "wall_s"),
)
"""Numerator and denominator of each `Estimate` of `Measured`, in its order."""

# One row per cell, a list over its prompts in each column: cells are few, prompts are many.
_BY_PROMPT = f"""
SELECT {", ".join(CELL_KEYS)},
  {", ".join(f"list({name} ORDER BY doc_id) AS {name}" for pair in _RATIOS for name in pair)}
FROM (SELECT {", ".join(CELL_KEYS)}, doc_id,
  sum(accepted) AS accepted, sum(drafted) AS drafted,
  sum(accepted) FILTER (WHERE workload = 'replay' OR NOT degenerate) AS sound_accepted,
  sum(drafted) FILTER (WHERE workload = 'replay' OR NOT degenerate) AS sound_drafted,
  sum(far_accepted) AS far_accepted, sum(far_rounds) AS far_rounds,
  sum(ar_decode_s) FILTER (WHERE decode_s IS NOT NULL) AS ar_decode_s,
  sum(decode_s) FILTER (WHERE ar_decode_s IS NOT NULL) AS decode_s,
  sum(ar_wall_s) FILTER (WHERE wall_s IS NOT NULL) AS ar_wall_s,
  sum(wall_s) FILTER (WHERE ar_wall_s IS NOT NULL) AS wall_s
FROM samples WHERE run_key = ? AND status = 'ok' GROUP BY ALL)
GROUP BY ALL
"""


@dataclass(frozen=True)
class Measured:
    """One cell: its row of the view `cells`, and the intervals over its prompts."""

    row: Mapping[str, Any]
    scene: str
    """What the method was asked to do: corpus, workload, temperature, as far as they vary in the run."""
    variant: str
    """How the method was set up: drafter, policy, positions, draft length mode, as far as they vary."""
    acceptance: Estimate
    sound_acceptance: Estimate
    """Without degenerate samples; a replay has none."""
    far_acceptance: Estimate
    """Of first drafts, at far-dependent positions of a replay."""
    decode_speedup: Estimate
    end_to_end_speedup: Estimate

    @property
    def setting(self) -> str:
        """All that must be equal before two cells may be compared, as a label."""
        return ", ".join(part for part in (self.scene, self.variant) if part)

    @property
    def name(self) -> str:
        """The method, with its variant where it has several."""
        return f"{self.row['method']} ({self.variant})" if self.variant else self.row["method"]

    def cell(self, *, sound: bool = False) -> Cell:
        """What a verdict needs; `sound` leaves degenerate samples out."""
        row, acceptance = self.row, self.sound_acceptance if sound else self.acceptance
        speedup = None if self.decode_speedup.value is None else self.decode_speedup
        return Cell(row["method"], row["context"], row["budget"], row["gamma"], acceptance, self.setting, speedup)


def measure(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[Measured]:
    """Every cell of a run in reading order: scene, context, `ar` first, method, budget with full last, gamma."""
    rows = records(connection, "SELECT * FROM cells WHERE run_key = ?", [run_key])
    prompts = {_key(row): row for row in arrays(connection, _BY_PROMPT, [run_key])}
    scene, variant = varying(SCENE, rows), varying(VARIANT, rows)
    sums = [prompts.get(_key(row), {}) for row in rows]
    estimates = iter(ratios_of_sums([(s.get(top, []), s.get(bottom, [])) for s in sums for top, bottom in _RATIOS]))
    cells = [Measured(row, label(row, scene), label(row, variant), *(next(estimates) for _ in _RATIOS)) for row in rows]
    return sorted(cells, key=_reading_order)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL_KEYS)


def _reading_order(cell: Measured) -> tuple[Any, ...]:
    row = cell.row
    return (
        cell.scene,
        row["context"],
        row["method"] != "ar",
        row["method"],
        cell.variant,
        row["budget"] < 0,
        row["budget"],
        row["gamma"],
        # A prompt fed to two drafters of one name gives two cells: keep their order stable.
        str(row["drafter_key"]),
    )


def summary_rows(workspace: Path, run_key: str) -> list[dict[str, Any]]:
    """The cells of a run for a terminal table; ratios as fractions with `lo` and `hi`, None where undefined."""
    return read(workspace, lambda connection: summary(measure(connection, run_key)), run_key=run_key)


def summary(cells: Iterable[Measured]) -> list[dict[str, Any]]:
    """Plain rows for a terminal table; ratios as fractions, None where undefined."""
    return [
        {
            "method": cell.row["method"],
            "drafter_name": cell.row["drafter_name"],
            "drafter_key": cell.row["drafter_key"],
            "setting": cell.setting,
            "workload": cell.row["workload"],
            "context": cell.row["context"],
            "budget": cell.row["budget"],
            "gamma": cell.row["gamma"],
            "acceptance": cell.acceptance.value,
            "lo": cell.acceptance.low,
            "hi": cell.acceptance.high,
            "tokens_per_round": cell.row["tokens_per_round"],
            "decode_speedup": cell.decode_speedup.value,
            "exact": f"{cell.row['exact_matches']}/{cell.row['exact_checked']}",
            "n": cell.row["n"],
            "failed": cell.row["failed"],
        }
        for cell in cells
    ]
