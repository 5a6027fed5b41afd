"""A run beside the paper: the printed numbers that it measured too, and what the printed ones say about each other."""

from typing import Any

import duckdb

from reports.paper import contradictions, peaks
from reports.printed import numbers
from reports.tables import records

_COMPARED = """
SELECT * FROM paper_comparison WHERE run_key = ? AND measured IS NOT NULL
ORDER BY exhibit, context, corpus, method, budget, gamma, metric DESC, drafter_name, policy, position_mode, temperature
"""


def beside_paper(connection: duckdb.DuckDBPyConnection, run_key: str, *, wanted: bool) -> dict[str, Any]:
    """What a report says of the paper.

    `shown`: whether it is a section of its own: where the run measured a cell of the paper's, or where it is `wanted`.
    Otherwise `note` is all there is to say.
    """
    printed = numbers()
    compared = records(connection, _COMPARED, [run_key])
    found, every = contradictions(printed), peaks(printed)
    marked = sum(n.contradicts is not None for n in printed)
    return {
        "shown": bool(compared) or wanted,
        "compared": compared,
        "contradictions": found,
        "peaks": every,
        "agreeing": sum(peak.agrees for peak in every),
        "marked": marked,
        "printed": len(printed),
        "note": f"The paper's own numbers are the view `paper_numbers`; {marked} of the {len(printed)} take part in "
        f"{len(found)} contradictions between its tables. This run measured no cell of its corpora, contexts and "
        "budgets.",
    }
