"""Sums per document of every cell of a run: what tests and swaps compare, document by document."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import duckdb

from bdcore.collapse.pairing import Sums
from reports.tables import CELL_KEYS, arrays

_SUMS = f"""
SELECT {", ".join(CELL_KEYS)}, list(doc_id ORDER BY doc_id) AS docs,
  list(accepted ORDER BY doc_id) AS accepted, list(drafted ORDER BY doc_id) AS drafted,
  list(ar_decode_s ORDER BY doc_id) AS ar_decode_s, list(decode_s ORDER BY doc_id) AS decode_s
FROM (
  SELECT {", ".join(CELL_KEYS)}, doc_id, sum(accepted) AS accepted, sum(drafted) AS drafted,
    sum(ar_decode_s) AS ar_decode_s, sum(decode_s) AS decode_s
  FROM samples WHERE run_key = ? AND status = 'ok' AND gamma > 0 GROUP BY ALL
)
GROUP BY ALL ORDER BY ALL
"""


@dataclass(frozen=True)
class Series:
    """One cell that drafts. `cell` holds its keys."""

    cell: Mapping[str, Any]
    acceptance: Mapping[str, Sums]
    """Document -> (accepted, drafted)."""
    seconds: Mapping[str, Sums]
    """Document -> (seconds of `ar`, seconds of the method), decoding alone; of a replay (None, None)."""

    def __getitem__(self, name: str) -> Any:
        return self.cell[name]


def per_document(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[Series]:
    return [
        Series(
            {name: row[name] for name in CELL_KEYS},
            _by_document(row["docs"], row["accepted"], row["drafted"]),
            _by_document(row["docs"], row["ar_decode_s"], row["decode_s"]),
        )
        for row in arrays(connection, _SUMS, [run_key])
    ]


def _by_document(docs: Any, first: Any, second: Any) -> dict[str, Sums]:
    return dict(zip(docs.tolist(), zip(first.tolist(), second.tolist(), strict=True), strict=True))


def aligned(*tables: Mapping[str, Sums]) -> list[list[Sums]]:
    """The tables over the documents that all of them have, in one order."""
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [[table[doc] for doc in shared] for table in tables]


def grouped(found: Iterable[Series], names: Sequence[str]) -> list[tuple[tuple[Any, ...], list[Series]]]:
    """Series by what they have in common, in the order of it."""

    def key(series: Series) -> tuple[Any, ...]:
        return tuple(series[name] for name in names)

    def order(series: Series) -> tuple[Any, ...]:
        return tuple((value is None, value) for value in key(series))

    return [(k, list(group)) for k, group in groupby(sorted(found, key=order), key=key)]


PLAIN = ("sd_full", "sd_sparse", "streaming", "budgetdraft")
"""Methods in which one drafter drafts by itself for the verifier, so that what they measure is the drafter's: the
rows of `OTHERS` are never added to these."""
OTHERS = ("hf_assisted", "triforce")
"""Methods that use the same drafters in another way."""


def plain(series: Iterable[Series]) -> list[Series]:
    return [s for s in series if s["method"] in PLAIN]


def with_full(sparse: Sequence[Series], full: Sequence[Series]) -> dict[int, Series]:
    """Budget -> series of one sparse setting, the full cache of the same drafter beside them.

    In-cache positions end with the budget, those of a full cache with the text: it is no larger budget of them.
    """
    found = full[:1] if sparse[0]["position_mode"] == "absolute" and sparse[0]["method"] in PLAIN else []
    return {series["budget"]: series for series in [*sparse, *found]}


SCENE = ("corpus", "workload", "temperature")


def scene_of(series: Series) -> str:
    temperature = series["temperature"]
    return f"{series['workload']} on {series['corpus']}" + (f", temperature {temperature:g}" if temperature else "")
