"""Where drafts die: by their position in the round, by the class of the verifier's token, by how far back the text
shows it."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from bdcore.collapse import Group, by_label
from bdcore.collapse.pairing import Sums
from reports.labels import drafters
from reports.tables import CELL_KEYS, names_known, records

_MINE = ", ".join(f"m.{key}" for key in CELL_KEYS)

# A draft is put to the test when it was drafted and all before it were accepted. The longest drafts and the longest
# context alone: a shorter draft only repeats the first positions.
_BY_POSITION = f"""
WITH drafting AS (SELECT * FROM samples WHERE run_key = $1 AND status = 'ok' AND gamma > 1),
mine AS (
  SELECT * FROM drafting s WHERE (workload, gamma, context) =
    (SELECT (workload, max(gamma), max(context)) FROM drafting d WHERE d.workload = s.workload GROUP BY workload)
)
SELECT {_MINE}, m.doc_id, 'position in the draft, ' || m.workload || ', gamma ' || m.gamma AS "by",
  i.position AS label, sum(r.rounds)::BIGINT AS drafted,
  coalesce(sum(r.rounds) FILTER (WHERE r.accepted >= i.position), 0)::BIGINT AS accepted
FROM mine m JOIN (SELECT cell_key, doc_id, drafted, accepted, rounds FROM round_counts WHERE run_key = $1) r
  USING (cell_key, doc_id)
  JOIN (SELECT unnest(range(1, 1 + (SELECT max(gamma) FROM mine))) AS position) i
  ON i.position <= r.drafted AND i.position - 1 <= r.accepted
GROUP BY ALL
"""

# First drafts alone, at the smallest gamma: one position of a replay is one trial, whatever the draft length.
_BY_TOKEN = f"""
WITH mine AS (
  SELECT * FROM samples s
  WHERE s.run_key = $1 AND s.status = 'ok' AND s.workload = 'replay' AND s.drafter_name IS NOT NULL
    AND s.gamma = (SELECT min(gamma) FROM samples WHERE run_key = $1 AND gamma > 0)
    AND s.context = (SELECT max(context) FROM samples WHERE run_key = $1 AND workload = 'replay')
)
SELECT {_MINE}, m.doc_id, '{{by}}' AS "by", {{label}} AS label,
  count(*) AS drafted, count(*) FILTER (WHERE r.accepted > 0) AS accepted
FROM mine m JOIN rounds r ON r.run_key = $1 AND r.cell_key = m.cell_key AND r.doc_id = m.doc_id
WHERE r.drafted > 0 AND r.token_class IS NOT NULL GROUP BY ALL
"""
_LABELS = {
    "token class": "r.token_class",
    "distance of the evidence (tokens)": """CASE WHEN r.evidence IS NULL THEN 'not in the text'
      WHEN r.evidence <= 64 THEN '1 to 64' WHEN r.evidence <= 256 THEN '65 to 256'
      WHEN r.evidence <= 1024 THEN '257 to 1024' ELSE 'above 1024' END""",
}
# Labels are few, documents are many: one row per cell and label, a list over its documents in each column.
_LISTS = f"""
SELECT "by", {", ".join(CELL_KEYS)}, label, list(accepted ORDER BY doc_id) AS accepted,
  list(drafted ORDER BY doc_id) AS drafted
FROM ({{sql}}) GROUP BY ALL ORDER BY ALL
"""
_ORDER = ("1 to 64", "65 to 256", "257 to 1024", "above 1024", "not in the text")


@dataclass(frozen=True)
class Deaths:
    """One cell at the longest context."""

    by: str
    name: str
    """Of the drafter: `reports.labels.drafters`."""
    corpus: str
    context: int
    budget: int
    policy: str
    position_mode: str
    groups: list[Group]
    """`acceptance` of a label: of the drafts put to the test there."""


def deaths(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[Deaths]:
    """Empty where nothing was recorded round by round."""
    if "rounds" not in names_known(connection):
        return []
    # A query over rounds opens thousands of files: none is asked for nothing.
    replayed = records(connection, "SELECT 1 FROM samples WHERE run_key = ? AND workload = 'replay' LIMIT 1", [run_key])
    by_token = [_BY_TOKEN.format(by=by, label=label) for by, label in _LABELS.items()] if replayed else []
    queries = [_BY_POSITION, *by_token]
    cells = [found for sql in queries for found in _asked(connection, run_key, sql)]
    names = drafters([cell for _, cell, _ in cells])
    shown = ("corpus", "context", "budget", "policy", "position_mode")
    return [
        Deaths(by, name, *(cell[key] for key in shown), _ordered(by_label(sums)))
        for (by, cell, sums), name in zip(cells, names, strict=True)
    ]


Asked = tuple[str, Mapping[str, Any], dict[Hashable, list[Sums]]]
"""What is asked, a cell's keys, and label -> (accepted, drafted) of every document that has it."""


def _asked(connection: duckdb.DuckDBPyConnection, run_key: str, sql: str) -> list[Asked]:
    found: dict[tuple[Any, ...], Asked] = {}
    for row in records(connection, _LISTS.format(sql=sql), [run_key]):
        cell = {key: row[key] for key in CELL_KEYS}
        _, _, sums = found.setdefault((row["by"], *cell.values()), (row["by"], cell, {}))
        sums[row["label"]] = list(zip(row["accepted"], row["drafted"], strict=True))
    return list(found.values())


def _ordered(groups: list[Group]) -> list[Group]:
    def place(group: Group) -> tuple[int, str]:
        if isinstance(group.label, int):
            return group.label, ""
        return (_ORDER.index(group.label), "") if group.label in _ORDER else (-1, str(group.label))

    return sorted(groups, key=place)
