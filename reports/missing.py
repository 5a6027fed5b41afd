"""What a run lacks of its grid."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import numpy as np

from reports.labels import counted
from reports.tables import CELL_KEYS, records

# Every series of the run is wanted on every prompt that any series of its corpus and workload was given.
_MISSING = """
WITH mine AS (SELECT * FROM samples WHERE run_key = ?),
prompts AS (SELECT DISTINCT corpus, workload, context, doc_id FROM mine),
series AS (SELECT DISTINCT corpus, workload, method, drafter_name, policy, position_mode, budget, gamma FROM mine)
SELECT s.method, s.drafter_name, s.corpus, s.workload, p.context, s.budget, s.policy, s.position_mode, s.gamma,
  count(*) AS missing
FROM series s JOIN prompts p USING (corpus, workload)
WHERE NOT EXISTS (SELECT 1 FROM mine m WHERE m.doc_id = p.doc_id AND m.context = p.context AND m.corpus = s.corpus
  AND m.workload = s.workload AND m.method = s.method AND m.budget = s.budget AND m.gamma = s.gamma
  AND m.policy = s.policy AND m.position_mode = s.position_mode AND m.drafter_name IS NOT DISTINCT FROM s.drafter_name)
GROUP BY ALL ORDER BY ALL
"""


def missing(connection: duckdb.DuckDBPyConnection, run_key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Which cells lack prompts, and a note when the grid is not whole.

    By `planned` where the facts have it; else a cell is missing what other cells of the run have.
    """
    present = records(connection, "SELECT count(*) AS n FROM samples WHERE run_key = ?", [run_key])[0]["n"]
    expected = facts.get("expected_samples")
    if expected is not None and present >= expected:
        return {"notes": [], "cells": []}
    planned = facts.get("planned")
    cells = _unmeasured(connection, run_key, planned) if planned else records(connection, _MISSING, [run_key])
    if expected is not None:
        note = f"This run is partial: {present} of {expected} samples are there, {expected - present} are missing."
        return {"notes": [note], "cells": cells}
    if not cells:
        return {"notes": [], "cells": []}
    prompts = counted(sum(c["missing"] for c in cells), "prompt")
    note = f"This run is partial: {prompts} of {counted(len(cells), 'cell')} not measured."
    return {"notes": [note], "cells": cells}


def _unmeasured(
    connection: duckdb.DuckDBPyConnection, run_key: str, planned: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The planned cells that have fewer rows than prompts, as many as `missing` of each."""
    keys = [name for name in CELL_KEYS if name in planned[0]]
    wanted: Counter[tuple[Any, ...]] = Counter()
    for cell in planned:
        wanted[_cell(cell, keys)] += cell["prompts"]
    for row in records(connection, "SELECT * FROM cells WHERE run_key = ?", [run_key]):
        wanted[_cell(row, keys)] -= row["n"] + row["failed"]
    return [dict(zip(keys, key, strict=True)) | {"missing": count} for key, count in wanted.items() if count > 0]


def _cell(row: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """What tells cells apart; a temperature of 0.8 is stored as the nearest float32."""
    return tuple(float(np.float32(row[k])) if isinstance(row[k], float) else row[k] for k in keys)
