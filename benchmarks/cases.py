"""The truths at which each verdict is tried: those where it must not be given, and those where it should."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.judgements import (
    Found,
    in_loops,
    of_acceptance,
    of_drafters,
    of_gammas,
    of_speed,
    of_swap,
    of_text,
    of_what_failed,
    over_budget,
    over_context,
    with_failures,
)
from benchmarks.truths import Draw, draw, failing, looping, text, timed


@dataclass(frozen=True)
class Case:
    """A truth, and what is found there."""

    truth: str
    levels: Sequence[float]
    """Of each setting: its acceptance over all documents there could be, its speedup, or the share of a text that
    loops."""
    correlation: float
    """Of a document's acceptances under two settings."""
    judge: Callable[[Any, int], Found]
    """Of what was drawn (settings x documents) and a seed."""
    right: frozenset[str] = frozenset()
    """The verdicts that should be given; all others are false alarms."""
    draw: Draw = draw


def cases() -> list[Case]:
    return [*_accepted(), *_failed(), *_looping(), *_timed()]


def _accepted() -> list[Case]:
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


_FALLING = (0.50, 0.40, 0.30, 0.125)


def _failed() -> list[Case]:
    collapse = frozenset(("collapsed, with failures",))
    named = frozenset(("context named as not judged",))
    some, weak, everything = (
        failing(0.25, settings=range(4)),
        failing(0.5, settings=[3], weakest=True),
        failing(1.0, settings=[3]),
    )
    return [
        Case("same, a quarter of the prompts fails", (0.45,) * 4, 0.5, with_failures, draw=some),
        Case("keeps a quarter, a quarter of the prompts fails", _FALLING, 0.5, with_failures, collapse, some),
        Case("keeps a quarter, the weaker half fails there", _FALLING, 0.5, with_failures, collapse, weak),
        Case("same, all prompts of one context fail", (0.45,) * 4, 0.5, of_what_failed, named, everything),
    ]


def _looping() -> list[Case]:
    collapse = frozenset(("collapsed, all texts", "collapsed, sound texts"))
    hidden, feigned = looping((0, 0, 0, 0.5)), looping((0.75, 0, 0, 0))
    texts = [
        ("no loop", 0.0, False),
        ("the last quarter loops", 0.25, False),
        ("the last half loops", 0.5, False),
        ("nine tenths loop", 0.9, False),
        ("the last half loops with a counter", 0.5, True),
        ("nine tenths loop with a counter", 0.9, True),
    ]
    return [
        Case("keeps a quarter, half of the texts there loop", _FALLING, 0.5, in_loops, collapse, hidden),
        Case("same, 3 in 4 texts loop at the shortest context", (0.30,) * 4, 0.5, in_loops, draw=feigned),
        *(
            Case(truth, (share,), 0.0, of_text, frozenset(["degenerate"] if share > 0.4 else []), text(counter=counter))
            for truth, share, counter in texts
        ),
    ]


def _timed() -> list[Case]:
    slower = frozenset(("slower for certain", "slower or likely"))
    apart, same = frozenset(("best gamma apart",)), frozenset(("best gamma same",))
    speeds: list[tuple[str, Sequence[float], frozenset[str]]] = [
        ("1.0x at 1 context", (1.0,), frozenset()),
        ("1.0x at 4 contexts", (1.0, 1.0, 1.0, 1.0), frozenset()),
        ("1.2x at 4 contexts", (1.2, 1.2, 1.2, 1.2), frozenset()),
        ("1.3, 1.1, 0.95, 0.9x", (1.3, 1.1, 0.95, 0.9), slower),
        ("1.4, 1.2, 1.0, 0.8x", (1.4, 1.2, 1.0, 0.8), slower),
    ]
    rising = (1.0, 1.1, 1.21)
    gammas: list[tuple[str, Sequence[float], Callable[[Any, int], Found], frozenset[str]]] = [
        ("gamma 4 best by 10 %, as predicted", rising, of_gammas(rising), same),
        ("3 gammas equally fast", (1.2, 1.2, 1.2), of_gammas((1.19, 1.2, 1.21), ("apart",)), frozenset()),
        ("gamma 2 best by 10 %, 4 predicted", (1.0, 1.21, 1.1), of_gammas(rising), apart),
        ("gamma 2 best by 25 %, 4 predicted", (1.0, 1.25, 1.0), of_gammas(rising), apart),
    ]
    return [
        *(Case(truth, levels, 0.5, of_speed, right, timed) for truth, levels, right in speeds),
        *(Case(truth, levels, 0.9, judge, right, timed) for truth, levels, judge, right in gammas),
    ]
