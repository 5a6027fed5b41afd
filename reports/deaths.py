"""Where in a text drafts die: acceptance by the class of the verifier's token and by how far back the text shows it."""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import duckdb

from bdcore.collapse import Group, by_label
from bdcore.collapse.pairing import Sums
from reports.tables import names_known, records

# First drafts alone, at the smallest gamma: one position of a replay is one trial, whatever the draft length.
_ROUNDS = """
WITH mine AS (
  SELECT s.drafter_name, s.corpus, s.context, s.budget, s.policy, s.position_mode, s.doc_id, s.cell_key
  FROM samples s
  WHERE s.run_key = $1 AND s.status = 'ok' AND s.workload = 'replay' AND s.drafter_name IS NOT NULL
    AND s.gamma = (SELECT min(gamma) FROM samples WHERE run_key = $1 AND gamma > 0)
    AND s.context = (SELECT max(context) FROM samples WHERE run_key = $1 AND workload = 'replay')
)
SELECT m.drafter_name, m.corpus, m.context, m.budget, m.policy, m.position_mode, m.doc_id,
  {label} AS label, count(*) AS drafted, count(*) FILTER (WHERE r.accepted > 0) AS accepted
FROM mine m JOIN rounds r ON r.run_key = $1 AND r.cell_key = m.cell_key AND r.doc_id = m.doc_id
WHERE r.drafted > 0 AND r.token_class IS NOT NULL GROUP BY ALL ORDER BY ALL
"""
LABELS = {
    "token class": "r.token_class",
    "distance of the evidence (tokens)": """CASE WHEN r.evidence IS NULL THEN 'not in the text'
      WHEN r.evidence <= 64 THEN '1 to 64' WHEN r.evidence <= 256 THEN '65 to 256'
      WHEN r.evidence <= 1024 THEN '257 to 1024' ELSE 'above 1024' END""",
}
ORDER = ("1 to 64", "65 to 256", "257 to 1024", "above 1024", "not in the text")


@dataclass(frozen=True)
class Deaths:
    """One drafter in one cell at the longest context."""

    by: str
    drafter: str
    corpus: str
    context: int
    budget: int
    policy: str
    position_mode: str
    groups: list[Group]


def deaths(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[Deaths]:
    """Empty where no replay was recorded round by round."""
    if "rounds" not in names_known(connection):
        return []
    return [found for by, label in LABELS.items() for found in _by(connection, run_key, by, label)]


def _by(connection: duckdb.DuckDBPyConnection, run_key: str, by: str, label: str) -> list[Deaths]:
    cells: dict[tuple[Any, ...], dict[str, dict[Hashable, Sums]]] = defaultdict(lambda: defaultdict(dict))
    names = ("drafter_name", "corpus", "context", "budget", "policy", "position_mode")
    for row in records(connection, _ROUNDS.format(label=label), [run_key]):
        cells[tuple(row[n] for n in names)][row["doc_id"]][row["label"]] = (row["accepted"], row["drafted"])
    return [Deaths(by, *key, _ordered(by_label(list(found.values())))) for key, found in cells.items()]


def _ordered(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda g: (ORDER.index(g.label) if g.label in ORDER else -1, str(g.label)))
