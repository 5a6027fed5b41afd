"""Is speculation worth it, and with which gamma: predicted from acceptance and costs, checked against the clock."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from bdcore.collapse import (
    Agreement,
    BreakEven,
    CostBound,
    Costs,
    agreement,
    best_gamma,
    break_even,
    expected_speedups,
    largest_cost_ratio,
)
from reports.series import SCENE, Series, aligned, grouped, scene_of
from reports.tables import CELL_KEYS, names_known, records

_SETTING = (*SCENE, "method", "drafter_name", "context", "budget", "policy", "position_mode", "gamma_mode", "refresh")

_COSTS = f"""
SELECT {", ".join(CELL_KEYS)},
  sum(draft_s + select_s) AS draft_s, sum(drafted) AS drafted, sum(verify_s) AS verify_s,
  sum(rounds) AS rounds, sum(ar_decode_s) AS ar_decode_s, sum(new_tokens - 1) AS tokens
FROM samples WHERE run_key = ? AND status = 'ok' AND gamma > 0 AND workload <> 'replay' AND decode_s IS NOT NULL
GROUP BY ALL
"""
_POSITIONS = f"SELECT {', '.join(CELL_KEYS)}, position, conditional FROM positions WHERE run_key = ? ORDER BY ALL"


@dataclass(frozen=True)
class Worth:
    """One drafter and setting at one context, over its draft lengths."""

    scene: str
    method: str
    context: int
    budget: int
    policy: str
    position_mode: str
    draft_ratio: float
    """Seconds of a draft token / of an `ar` step."""
    verify_ratios: Mapping[int, float]
    """gamma -> seconds of a verify / of an `ar` step."""
    predicted: Mapping[int, float]
    """gamma -> expected decode speedup."""
    best: int
    """Predicted; 0: the verifier alone."""
    needed: BreakEven
    """At the shortest measured draft length."""
    pair: CostBound
    check: Agreement


def worth(connection: duckdb.DuckDBPyConnection, run_key: str, series: Sequence[Series]) -> list[Worth]:
    """Empty where no round was recorded."""
    if "positions" not in names_known(connection):
        return []
    costs = {_key(row): row for row in records(connection, _COSTS, [run_key])}
    conditional: dict[tuple[Any, ...], list[float | None]] = defaultdict(list)
    for row in records(connection, _POSITIONS, [run_key]) if costs else []:
        conditional[_key(row)].append(row["conditional"])
    timed = [s for s in series if _key(s.cell) in costs]
    found = [_worth(group, costs, conditional) for _, group in grouped(timed, _SETTING)]
    return [one for one in found if one is not None]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CELL_KEYS)


def _worth(
    group: Sequence[Series],
    costs: Mapping[tuple[Any, ...], Mapping[str, Any]],
    conditional: Mapping[tuple[Any, ...], list[float | None]],
) -> Worth | None:
    rows = {s["gamma"]: costs[_key(s.cell)] for s in group}
    longest = max(group, key=lambda s: s["gamma"])
    acceptance = conditional.get(_key(longest.cell), [])
    ar_s, draft_s = (_mean(rows.values(), *names) for names in (("ar_decode_s", "tokens"), ("draft_s", "drafted")))
    verify_s = {g: row["verify_s"] / row["rounds"] for g, row in rows.items() if row["rounds"] and row["verify_s"]}
    usable = {g: s for g, s in verify_s.items() if g <= len(acceptance)}
    if not ar_s or draft_s is None or not usable:
        return None
    measured = Costs(draft_s, usable, ar_s)
    predicted = {g: v for g, v in expected_speedups(acceptance, measured).items() if g in usable}
    ratios = {g: s / ar_s for g, s in usable.items()}
    seconds = dict(zip([s["gamma"] for s in group], aligned(*(s.seconds for s in group)), strict=True))
    first = group[0]
    return Worth(
        scene_of(first),
        first["method"] if first["drafter_name"] in (None, "base", "trained", "self") else first["drafter_name"],
        first["context"],
        first["budget"],
        first["policy"],
        first["position_mode"],
        draft_s / ar_s,
        ratios,
        predicted,
        best_gamma({0: 1.0, **predicted}),
        break_even(measured, min(usable)),
        largest_cost_ratio(acceptance, ratios),
        agreement(predicted, {g: seconds[g] for g in usable}),
    )


def _mean(rows: Any, top: str, bottom: str) -> float | None:
    rows = list(rows)
    whole = sum(row[bottom] or 0 for row in rows)
    return sum(row[top] or 0.0 for row in rows) / whole if whole else None
