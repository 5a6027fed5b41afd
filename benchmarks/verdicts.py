"""How often the verdicts are right: false alarms, power and coverage over synthetic documents of known truth.

A document's acceptance is drawn from a beta distribution, its accepted tokens from a binomial one. Settings measured on
the same documents share their luck: a Gaussian copula of the given correlation joins a document's acceptances. Drafted
tokens and spread between documents are about those of the CPU study (16 positions, gamma 1).

    python benchmarks/verdicts.py --out docs/results/verdicts.csv     # under 5 minutes on one core
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from bdcore.collapse import (
    Cell,
    Estimate,
    attribute_loss,
    budget_effects,
    budget_sensitivity,
    collapse_boundaries,
    difference,
    monotonicity,
    permutation_test,
    ratio_of_sums,
)
from bdcore.collapse.budgets import budget_table
from bdcore.collapse.intervals import CONFIDENCE, LEVEL, estimate
from bdcore.collapse.pairing import Sums
from bdcore.collapse.sensitivity import range_by_mean
from reports.files import csv_of, write_text

DOCUMENTS = (4, 8, 16, 32)
DRAFTED, CONCENTRATION = 16, 6.0
CONTEXTS, BUDGETS = (512, 1024, 2048, 4096), (64, 128, 256, -1)
# A report draws 2000 times and swaps 9999 times. Fewer are enough to count verdicts, and keep this under 5 minutes.
INTERVAL, TEST, SWAPS = 1000, 300, 999

Tables = list[list[Sums]]
Found = Mapping[str, bool | None]
"""Verdict -> it was given; interval -> it covers the truth, None where there is none."""

NOMINAL = {
    # One end of a 95 % interval.
    **dict.fromkeys(("collapsed", "gives back"), (1 - CONFIDENCE) / 2),
    **dict.fromkeys(("sensitive", "dip", "permutation p < 0.05"), LEVEL),
}
COVERS = "interval of "


@dataclass(frozen=True)
class Case:
    """A truth, and what is found there."""

    truth: str
    acceptance: Sequence[float]
    """Of each setting, over all documents there could be."""
    correlation: float
    """Of a document's acceptances under two settings."""
    judge: Callable[[Tables, int], Found]
    """Of settings x documents and a seed."""
    right: frozenset[str] = frozenset()
    """The verdicts that should be given; all others are false alarms."""


def draw(rng: np.random.Generator, acceptance: Sequence[float], documents: int, correlation: float) -> Tables:
    """(accepted, drafted) of the same documents under each setting."""
    mean = np.array(acceptance)[:, None]
    common, own = rng.standard_normal((1, documents)), rng.standard_normal((len(acceptance), documents))
    luck = special.ndtr(np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own)
    chance = special.betaincinv(mean * CONCENTRATION, (1 - mean) * CONCENTRATION, luck)
    return [[(float(a), float(DRAFTED)) for a in row] for row in rng.binomial(DRAFTED, chance)]


# --- what is found


def _acceptance(sums: Sequence[Sums], seed: int) -> Estimate:
    return ratio_of_sums([a for a, _ in sums], [b for _, b in sums], resamples=INTERVAL, seed=seed)


def _covers(found: Estimate, truth: float) -> bool | None:
    return None if found.low is None or found.high is None else found.low <= truth <= found.high


def over_context(tables: Tables, seed: int) -> Found:
    pairs = zip(CONTEXTS, tables, strict=False)
    [verdict] = collapse_boundaries(Cell("m", context, 256, 4, _acceptance(sums, seed)) for context, sums in pairs)
    return {
        "collapsed": verdict.status == "collapsed",
        "collapse certain at some context": verdict.certain_from is not None,
        "collapsed or likely": verdict.status in ("collapsed", "likely"),
    }


def over_budget(acceptance: Sequence[float]) -> Callable[[Tables, int], Found]:
    truth = float(np.ptp(acceptance) / np.mean(acceptance))

    def judge(tables: Tables, seed: int) -> Found:
        by_budget = dict(zip(BUDGETS, tables, strict=True))
        cells = [Cell("m", 4096, budget, 4, _acceptance(sums, seed)) for budget, sums in by_budget.items()]
        columns = budget_table(by_budget).columns
        bca = estimate(range_by_mean, columns, resamples=INTERVAL, seed=seed, kinds=("BCa",))
        sensitive = budget_sensitivity(by_budget, resamples=TEST, seed=seed)
        return {
            "budget effect": budget_effects(cells)[0].status == "effect",
            "sensitive": sensitive.status == "sensitive",
            "dip": monotonicity(by_budget, resamples=TEST, seed=seed).status == "dip",
            f"{COVERS}range / mean": _covers(sensitive.spread, truth),
            f"{COVERS}range / mean, if it were BCa": _covers(bca, truth),
        }

    return judge


def of_drafters(tables: Tables, seed: int) -> Found:
    found = permutation_test(*tables, resamples=SWAPS, seed=seed)
    return {"permutation p < 0.05": found.status == "different"}


def of_acceptance(acceptance: Sequence[float]) -> Callable[[Tables, int], Found]:
    """The interval of each setting's own acceptance, and of the paired difference of two."""

    def judge(tables: Tables, seed: int) -> Found:
        return {
            f"{COVERS}acceptance": _covers(_acceptance(tables[0], seed), acceptance[0]),
            f"{COVERS}paired difference": _covers(
                difference(tables[1], tables[0], resamples=INTERVAL), acceptance[1] - acceptance[0]
            ),
        }

    return judge


def of_swap(acceptance: Sequence[float]) -> Callable[[Tables, int], Found]:
    reference, baseline, swapped = acceptance

    def judge(tables: Tables, seed: int) -> Found:
        [swap] = attribute_loss(tables[0], tables[1], {"swap": tables[2]}, resamples=INTERVAL).swaps
        return {
            "gives back": swap.status == "gives back",
            f"{COVERS}points given back": _covers(swap.gained, swapped - baseline),
            f"{COVERS}share given back": _covers(swap.share, (swapped - baseline) / (reference - baseline)),
        }

    return judge


# --- where


def cases() -> list[Case]:
    """Every verdict at truths where it must not be given and at truths where it should."""
    collapse = frozenset(("collapsed", "collapse certain at some context", "collapsed or likely"))
    effect = frozenset(("budget effect", "sensitive"))
    contexts: list[tuple[str, Sequence[float], frozenset[str]]] = [
        ("same at 4 contexts", (0.45, 0.45, 0.45, 0.45), frozenset()),
        ("keeps 70 % at 4 contexts", (0.50, 0.45, 0.40, 0.35), frozenset()),
        ("keeps exactly half at 1 longer context", (0.50, 0.25), frozenset()),
        ("keeps a quarter: 50, 40, 30, 12.5 %", (0.50, 0.40, 0.30, 0.125), collapse),
        ("as the base drafter: 45, 23, 11, 15 %", (0.45, 0.23, 0.11, 0.15), collapse),
    ]
    budgets: list[tuple[str, Sequence[float], frozenset[str]]] = [
        ("same at 4 budgets", (0.45, 0.45, 0.45, 0.45), frozenset()),
        ("rises: 35, 42, 48, 50 %", (0.35, 0.42, 0.48, 0.50), effect),
        ("dips at the end: 30, 40, 50, 42 %", (0.30, 0.40, 0.50, 0.42), effect | {"dip"}),
        ("falls: 66, 62, 56, 34 %", (0.66, 0.62, 0.56, 0.34), effect | {"dip"}),
    ]
    drafters = [(f"{100 * gap:.0f} points apart", (0.45, 0.45 + gap)) for gap in (0.05, 0.10, 0.20)]
    different = frozenset(("permutation p < 0.05",))
    pairs = [("45 and 50 %", (0.45, 0.50)), ("10 and 15 %", (0.10, 0.15))]
    swaps = [
        ("gives back half of 30 points", (0.50, 0.20, 0.35), frozenset(("gives back",))),
        ("gives back none of 30 points", (0.50, 0.20, 0.20), frozenset[str]()),
    ]
    return [
        *(Case(truth, a, 0.5, over_context, right) for truth, a, right in contexts),
        *(Case(truth, a, 0.9, over_budget(a), right) for truth, a, right in budgets),
        Case("equal drafters", (0.45, 0.45), 0.9, of_drafters),
        *(Case(truth, a, 0.9, of_drafters, different) for truth, a in drafters),
        *(Case(truth, a, 0.9, of_acceptance(a)) for truth, a in pairs),
        *(Case(truth, a, 0.7, of_swap(a), right) for truth, a, right in swaps),
    ]


def measure(case: Case, documents: int, repeats: int) -> list[dict[str, Any]]:
    """One row per verdict or interval: how often, over `repeats` draws of that many documents."""
    found: dict[str, list[bool]] = defaultdict(list)
    for seed in range(repeats):
        tables = draw(np.random.default_rng([documents, seed]), case.acceptance, documents, case.correlation)
        for name, value in case.judge(tables, seed).items():
            found[name] += [] if value is None else [value]
    return [_row(case, documents, name, values, repeats) for name, values in found.items()]


def _row(case: Case, documents: int, name: str, values: Sequence[bool], repeats: int) -> dict[str, Any]:
    covers = name.startswith(COVERS)
    kind = "coverage" if covers else "power" if name in case.right else "false alarm"
    rate = sum(values) / len(values) if values else None
    return {
        "verdict": name.removeprefix(COVERS),
        "kind": kind,
        "truth": case.truth,
        "nominal": CONFIDENCE if covers else NOMINAL.get(name) if kind == "false alarm" else None,
        "documents": documents,
        "rate": rate,
        "error": None if rate is None else round((rate * (1 - rate) / len(values)) ** 0.5, 4),
        # Where an interval was claimed: the rate is of these.
        "judged": len(values),
        "repeats": repeats,
    }


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per verdict and truth, one column per number of documents, rates in %."""
    lines: dict[tuple[Any, ...], dict[int, float | None]] = defaultdict(dict)
    for row in rows:
        lines[row["kind"], row["verdict"], row["truth"], row["nominal"]][row["documents"]] = row["rate"]
    counts = sorted({n for rates in lines.values() for n in rates})
    text = ["| | verdict or interval | truth | promised | " + " | ".join(f"n = {n}" for n in counts) + " |"]
    text.append("|---|---|---|--:|" + "--:|" * len(counts))
    order = ("false alarm", "power", "coverage")
    for key in sorted(lines, key=lambda key: order.index(key[0])):
        kind, verdict, truth, nominal = key
        rates = " | ".join(_percent(lines[key].get(n)) for n in counts)
        text.append(f"| {kind} | {verdict} | {truth} | {_percent(nominal)} | {rates} |")
    return "\n".join(text)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.1f}"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=250, help="draws per truth and number of documents")
    parser.add_argument("--documents", type=int, nargs="+", default=list(DOCUMENTS))
    parser.add_argument("--out", type=Path, default=Path("docs/results/verdicts.csv"))
    options = parser.parse_args(argv)
    start = time.process_time()
    rows: list[dict[str, Any]] = []
    for case in cases():
        for documents in options.documents:
            rows += measure(case, documents, options.repeats)
        print(f"{time.process_time() - start:5.0f} s of CPU time: {case.truth}", file=sys.stderr, flush=True)
    write_text(options.out, csv_of(rows))
    print(markdown(rows))
    return rows


if __name__ == "__main__":
    main()
