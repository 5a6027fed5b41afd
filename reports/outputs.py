"""Sample outputs beside those of the verifier alone, with accepted drafts marked."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import duckdb

from reports.tables import records

TEXT_LIMIT = 1500
"""Characters shown of a sample's output."""

_PAIRS = """
SELECT m.method, m.corpus, m.workload, m.doc_id, m.context, m.budget, m.gamma, m.exact_match, m.first_mismatch,
  m.degenerate, m.distinct_4, m.accepted, m.new_tokens, a.filename AS ar_file, a.file_row_number AS ar_row,
  m.filename AS method_file, m.file_row_number AS method_row
FROM samples m JOIN samples a
  ON a.run_key = m.run_key AND a.method = 'ar' AND a.corpus = m.corpus AND a.workload = m.workload
  AND a.temperature IS NOT DISTINCT FROM m.temperature AND a.context = m.context AND a.doc_id = m.doc_id
WHERE m.run_key = ? AND m.method <> 'ar' AND m.new_tokens IS NOT NULL AND a.new_tokens IS NOT NULL
QUALIFY row_number() OVER (
  PARTITION BY m.doc_id ORDER BY coalesce(m.exact_match, false), m.method = 'budgetdraft' DESC, m.context DESC,
    m.method, m.budget, m.gamma) = 1
ORDER BY coalesce(m.exact_match, false), m.degenerate, m.context, m.doc_id LIMIT 3
"""

# All columns: rows of an older version have no `accepted_spans`.
_TEXT = "SELECT * FROM read_parquet(?, file_row_number = true) WHERE file_row_number = ?"


def side_by_side(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[dict[str, Any]]:
    """Outputs beside those of the verifier alone; the texts are read from the few files that hold them."""
    found: list[dict[str, Any]] = []
    for pair in records(connection, _PAIRS, [run_key]):
        sides = {
            side: records(connection, _TEXT, [pair[f"{side}_file"], pair[f"{side}_row"]])[0]
            for side in ("ar", "method")
        }
        if all(side["output_text"] is not None for side in sides.values()):
            found.append(
                pair
                | {f"{n}_pieces": in_pieces(s["output_text"], s.get("accepted_spans") or []) for n, s in sides.items()}
            )
    return found


def in_pieces(text: str, spans: Sequence[int]) -> list[tuple[str, bool]]:
    """A text in pieces, each with whether it is accepted drafts; cut where it is long."""
    shown = min(len(text), TEXT_LIMIT)
    # A character in the making is shorter as text than its first bytes alone: ends may seem to step back.
    edges = list(accumulate([0, *(min(edge, shown) for edge in spans), shown], max))
    pieces = [(text[start:end], i % 2 == 1) for i, (start, end) in enumerate(pairwise(edges))]
    more = len(text) - TEXT_LIMIT
    tail = [(f" [... {more} more characters]", False)] if more > 0 else []
    return [piece for piece in [*pieces, *tail] if piece[0]]
