"""The drafters of all studies in a workspace side by side: which is best where, and by how much.

Two tables pass through here, both lists of plain rows. `documents`: sums of one document in one cell of one drafter.
`rows`: one cell of one drafter over its documents, with intervals. A cell is a row's `CELL` columns.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bdcore.collapse import MIN_PROMPTS, Estimate, ratio_of_sums
from bdcore.collapse.pairing import Sums, difference, quotient

Row = dict[str, Any]

SERIES = ("workload", "corpus", "budget", "policy", "position_mode", "gamma")
CELL = ("workload", "corpus", "context", "budget", "policy", "position_mode", "gamma")
_LAST = {"base": 1, "ngram": 2}
COLUMNS = (
    *("study", "seed", "drafter", *CELL),
    *("acceptance", "lo", "hi", "speedup_decode", "n"),
    *("far_acceptance", "degenerate_share", "acceptance_nondegenerate"),
)
VERDICTS = (
    *("drafter", "seed", *CELL, "acceptance", "lo", "hi", "n"),
    *("reference", "reference_acceptance", "reference_lo", "reference_hi", "reference_n", "verdict"),
)
RETAINED = ("drafter", "seed", *CELL, "shortest", "acceptance", "retention", "lo", "hi", "n")
COMPARED = ("drafter", "other", "seed", *CELL, "acceptance", "other_acceptance", "difference", "lo", "hi", "n")


def envelope(documents: Iterable[Mapping[str, Any]]) -> list[Row]:
    """One row of exactly `COLUMNS` per cell, drafter and seed. Ratios of sums over documents; None where undefined.

    `lo`, `hi`: 95 % bootstrap interval of acceptance over documents; `n`: documents that drafted.
    """
    groups = _grouped(documents, ("study", "seed", "drafter", *CELL))
    return sorted((_row(found) for found in groups.values()), key=reading_order)


def reading_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cells as they are read, the full cache after the sparse ones; drafters within a cell."""
    scene = row["workload"], row["corpus"], row["policy"] == "full", row["policy"], row["position_mode"], row["gamma"]
    return *scene, row["budget"] < 0, row["budget"], row["context"], row["drafter"], row["seed"]


def _row(found: Sequence[Mapping[str, Any]]) -> Row:
    acceptance = ratio_of_sums(_column(found, "accepted"), _column(found, "drafted"))
    flags = [d["degenerate"] for d in found if d["degenerate"] is not None]
    return {
        **{name: found[0][name] for name in ("study", "seed", "drafter", *CELL)},
        "acceptance": acceptance.value,
        "lo": acceptance.low,
        "hi": acceptance.high,
        "speedup_decode": _ratio(found, "ar_decode_s", "decode_s"),
        "n": acceptance.n,
        "far_acceptance": _ratio(found, "far_accepted", "far_rounds"),
        "degenerate_share": sum(flags) / len(flags) if flags else None,
        "acceptance_nondegenerate": _ratio([d for d in found if _sound(d)], "accepted", "drafted"),
    }


def _sound(document: Mapping[str, Any]) -> bool:
    """Not flagged as a loop. A replay runs along human text, which is sound."""
    return document["workload"] == "replay" or document["degenerate"] is False


def _column(found: Iterable[Mapping[str, Any]], name: str) -> list[float | None]:
    return [d[name] for d in found]


def _ratio(found: Iterable[Mapping[str, Any]], top: str, bottom: str) -> float | None:
    pairs = [(d[top], d[bottom]) for d in found if d[top] is not None and d[bottom] is not None]
    below = sum(b for _, b in pairs)
    return sum(a for a, _ in pairs) / below if below else None


def upper_envelope(rows: Iterable[Mapping[str, Any]], drafter: str, references: Sequence[str]) -> list[Row]:
    """Per cell and seed: is `drafter` at least as good as the better of `references` there, within the intervals?

    `verdict`: `above` or `below` where the intervals lie apart, `within` where they meet, `insufficient` where either
    has fewer than `MIN_PROMPTS` documents, no acceptance or no interval, `no reference` where none was measured. The
    intervals are each drafter's own: `compare` is the sharper question. ValueError for a name that no row has.
    """
    table = list(rows)
    _known(table, [drafter, *references])
    cells = _grouped(table, ("seed", *CELL))
    found = [_verdict(cell, drafter, references) for cell in cells.values()]
    return sorted((row for row in found if row), key=reading_order)


def _verdict(cell: Sequence[Mapping[str, Any]], drafter: str, references: Sequence[str]) -> Row | None:
    mine = next((row for row in cell if row["drafter"] == drafter), None)
    if mine is None:
        return None
    others = [row for row in cell if row["drafter"] in references and row["acceptance"] is not None]
    best = max(others, key=lambda row: row["acceptance"], default=None)
    told = ("acceptance", "lo", "hi", "n")
    return {
        **{name: mine[name] for name in ("drafter", "seed", *CELL, *told)},
        "reference": best and best["drafter"],
        **{f"reference_{name}": best and best[name] for name in told},
        "verdict": _judge(mine, best),
    }


def _judge(mine: Mapping[str, Any], best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "no reference"
    if mine["acceptance"] is None or min(mine["n"], best["n"]) < MIN_PROMPTS:
        return "insufficient"
    if mine["acceptance"] == best["acceptance"]:
        return "within"
    if None in (mine["lo"], best["lo"]):
        return "insufficient"
    if mine["hi"] < best["lo"]:
        return "below"
    return "above" if mine["lo"] > best["hi"] else "within"


def retention(documents: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Acceptance at each context relative to the shortest one, per drafter, seed and `SERIES`.

    Over the documents that are at every context of the series, so that the texts are the same; `n` counts them, and
    `acceptance` is theirs. The shortest context retains 1. Series of one context have no rows.
    """
    series = _grouped(documents, ("drafter", "seed", *SERIES)).values()
    return sorted((row for found in series for row in _retained(found)), key=reading_order)


def _retained(found: Sequence[Mapping[str, Any]]) -> list[Row]:
    sums = {context: _sums(group) for (context,), group in _grouped(found, ("context",)).items()}
    if len(sums) < 2:
        return []
    shared = sorted(set.intersection(*(set(s) for s in sums.values())))
    first, same = min(sums), {name: found[0][name] for name in ("drafter", "seed", *SERIES)}
    start = [sums[first][doc] for doc in shared]
    rows: list[Row] = []
    for context in sorted(sums):
        here = [sums[context][doc] for doc in shared]
        kept = quotient(here, start)
        rows.append(
            {
                **same,
                "context": context,
                "shortest": first,
                "acceptance": _of(here),
                "retention": kept.value,
                **_bounds(kept, certain=context == first),
            }
        )
    return rows


def _bounds(estimate: Estimate, *, certain: bool = False) -> Row:
    low, high = (estimate.value, estimate.value) if certain else (estimate.low, estimate.high)
    return {"lo": low, "hi": high, "n": estimate.n}


def compare(documents: Iterable[Mapping[str, Any]], first: str, second: str) -> list[Row]:
    """Difference in acceptance of two drafters per cell and seed, over the documents that both drafted in.

    `difference` is `acceptance` of `first` minus that of `second`; `lo`, `hi`: paired 95 % bootstrap interval over
    documents; None where there is none. ValueError for a name that no document has.
    """
    table = list(documents)
    _known(table, [first, second])
    cells = _grouped((d for d in table if d["drafter"] in (first, second)), ("seed", *CELL))
    found = [_compared(cell, first, second) for cell in cells.values()]
    return sorted((row for row in found if row), key=reading_order)


def _compared(cell: Sequence[Mapping[str, Any]], first: str, second: str) -> Row | None:
    mine, theirs = (_sums([d for d in cell if d["drafter"] == name]) for name in (first, second))
    shared = sorted(doc for doc in mine.keys() & theirs.keys() if mine[doc][1] and theirs[doc][1])
    if not shared:
        return None
    here, there = [mine[doc] for doc in shared], [theirs[doc] for doc in shared]
    gap = difference(here, there)
    return {
        **{"drafter": first, "other": second},
        **{name: cell[0][name] for name in ("seed", *CELL)},
        **{"acceptance": _of(here), "other_acceptance": _of(there), "difference": gap.value},
        **_bounds(gap),
    }


def compare_all(documents: Sequence[Mapping[str, Any]], against: Sequence[str] = ()) -> list[Row]:
    """`compare` of every drafter with those of `against`; of every pair when that is empty."""
    names = drafters(documents)
    _known(documents, against)
    pairs = [(a, b) for i, a in enumerate(names) for b in (against or names[i + 1 :]) if a != b]
    return [row for a, b in pairs for row in compare(documents, a, b)]


def drafters(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of drafters: trained ones first, then the base, then prompt lookup."""
    return sorted({row["drafter"] for row in table}, key=lambda name: (_LAST.get(re.split("[@ ]", name)[0], 0), name))


def _sums(found: Iterable[Mapping[str, Any]]) -> dict[str, Sums]:
    return {d["doc_id"]: (d["accepted"], d["drafted"]) for d in found}


def _of(sums: Sequence[Sums]) -> float | None:
    return _ratio([{"a": a, "b": b} for a, b in sums], "a", "b")


def _grouped(table: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[Any, ...], list[Any]]:
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in table:
        groups[tuple(row[name] for name in names)].append(row)
    return groups


def _known(table: Iterable[Mapping[str, Any]], names: Iterable[str]) -> None:
    found = drafters(table)
    for name in names:
        if name not in found:
            raise ValueError(f"drafter = {name}: no rows of it; found {', '.join(found) or 'none'}")
