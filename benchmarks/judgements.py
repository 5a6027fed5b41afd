"""What is found of synthetic documents: which verdicts are given, and whether an interval covers the truth."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bdcore.collapse import (
    Cell,
    Collapse,
    Estimate,
    agreement,
    attribute_loss,
    budget_effects,
    budget_sensitivity,
    collapse_boundaries,
    difference,
    monotonicity,
    permutation_test,
    ratios_of_sums,
    speedup_boundaries,
)
from bdcore.collapse.budgets import budget_table
from bdcore.collapse.intervals import estimate
from bdcore.collapse.sensitivity import range_by_mean
from bdcore.evaluation.degeneracy import is_degenerate
from benchmarks.truths import Tables

CONTEXTS, BUDGETS, GAMMAS = (512, 1024, 2048, 4096), (64, 128, 256, -1), (1, 2, 4)
# A report draws 2000 times, and swaps 1999 times above 13 documents. Fewer are enough to count verdicts.
INTERVAL, TEST, SWAPS = 1000, 300, 999
COVERS = "interval of "

Found = Mapping[str, bool | None]
"""Verdict -> it was given; interval -> it covers the truth, None where there is none."""


def _ratios(tables: Tables, seed: int) -> list[Estimate]:
    sums = [([a for a, _ in row], [b for _, b in row]) for row in tables]
    return ratios_of_sums(sums, resamples=INTERVAL, seed=seed)


def _covers(found: Estimate, truth: float) -> bool | None:
    return None if found.low is None or found.high is None else found.low <= truth <= found.high


def _collapse(tables: Tables, seed: int) -> Collapse:
    pairs = zip(CONTEXTS, _ratios(tables, seed), strict=False)
    [verdict] = collapse_boundaries(Cell("m", context, 256, 4, acceptance) for context, acceptance in pairs)
    return verdict


def over_context(tables: Tables, seed: int) -> Found:
    verdict = _collapse(tables, seed)
    return {
        "collapsed": verdict.status == "collapsed",
        "collapse certain at some context": verdict.certain_from is not None,
        "collapsed or likely": verdict.status in ("collapsed", "likely"),
    }


def over_budget(acceptance: Sequence[float]) -> Callable[[Tables, int], Found]:
    truth = float(np.ptp(acceptance) / np.mean(acceptance))

    def judge(tables: Tables, seed: int) -> Found:
        by_budget = dict(zip(BUDGETS, tables, strict=True))
        pairs = zip(BUDGETS, _ratios(tables, seed), strict=True)
        cells = [Cell("m", 4096, budget, 4, acceptance) for budget, acceptance in pairs]
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
            f"{COVERS}acceptance": _covers(_ratios(tables[:1], seed)[0], acceptance[0]),
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


def in_loops(drawn: tuple[Tables, list[list[bool]]], seed: int) -> Found:
    """By all texts, and by those that do not loop."""
    tables, loops = drawn
    sound = [[s for s, looping in zip(*row, strict=True) if not looping] for row in zip(tables, loops, strict=True)]
    return {
        "collapsed, all texts": _collapse(tables, seed).status == "collapsed",
        "collapsed, sound texts": _collapse(sound, seed).status == "collapsed",
    }


def of_text(tokens: Sequence[int], seed: int) -> Found:
    return {"degenerate": is_degenerate(tokens)}


def with_failures(tables: Tables, seed: int) -> Found:
    return {"collapsed, with failures": _collapse(tables, seed).status == "collapsed"}


def of_what_failed(tables: Tables, seed: int) -> Found:
    named = f"Too few prompts to judge {CONTEXTS[-1]} tokens" in _collapse(tables, seed).sentence
    return {"context named as not judged": named}


def of_speed(tables: Tables, seed: int) -> Found:
    untold = Estimate(None, None, None, 0)
    pairs = zip(CONTEXTS, _ratios(tables, seed), strict=False)
    [verdict] = speedup_boundaries(Cell("m", context, 256, 4, untold, speedup=speed) for context, speed in pairs)
    return {
        "slower for certain": verdict.status == "collapsed",
        "slower or likely": verdict.status in ("collapsed", "likely"),
    }


def of_gammas(predicted: Sequence[float], named: Sequence[str] = ("apart", "same")) -> Callable[[Tables, int], Found]:
    """The measured best against the speedups that are predicted; the verdicts that are right or wrong there."""

    def judge(tables: Tables, seed: int) -> Found:
        found = agreement(dict(zip(GAMMAS, predicted, strict=True)), dict(zip(GAMMAS, tables, strict=True)))
        return {f"best gamma {status}": found.status == status for status in named}

    return judge
