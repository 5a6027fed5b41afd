"""Tests over budgets and drafters: does acceptance depend on the budget, fall with it, differ between drafters?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from bdcore.collapse import (
    Monotonicity,
    Permutation,
    Sensitivity,
    budget_sensitivity,
    monotonicity,
    permutation_test,
)
from bdcore.schema import FULL_BUDGET, SELF
from reports.series import PLAIN, SCENE, Series, aligned, grouped, plain, scene_of, with_full


@dataclass(frozen=True)
class BudgetTest:
    """One drafter at one context, policy, position mode and gamma, over its budgets."""

    name: str
    sensitivity: Sensitivity
    monotonicity: Monotonicity


def budget_tests(series: Sequence[Series]) -> list[BudgetTest]:
    """The full cache counts as the largest budget of the drafter's settings at absolute positions."""
    drafting = [s for s in series if s["drafter_name"] not in (None, SELF)]
    out: list[BudgetTest] = []
    for _, group in grouped(drafting, (*SCENE, "drafter_name", "context", "gamma", "gamma_mode")):
        full = [s for s in plain(group) if s["budget"] == FULL_BUDGET]
        sparse = [s for s in group if s["budget"] != FULL_BUDGET]
        for _, setting in grouped(sparse, ("method", "policy", "position_mode", "refresh")):
            found = with_full(setting, full)
            if len(found) > 1:
                out.append(_tested(setting[0], found))
    return out


def _tested(first: Series, found: dict[int, Series]) -> BudgetTest:
    sums = dict(zip(found, aligned(*(s.acceptance for s in found.values())), strict=True))
    name = (
        f"{scene_of(first)}, {_maker(first)}, {first['policy']}, {first['position_mode']}, "
        f"gamma {first['gamma']}, {first['context']} tokens"
    )
    return BudgetTest(name, budget_sensitivity(sums, name=name), monotonicity(sums, name=name))


def drafter_tests(series: Sequence[Series]) -> list[tuple[str, Permutation]]:
    """(where, test) of every two drafters in the same cell, at the smallest gamma; each drafts by itself."""
    drafting = plain(series)
    gamma = min((s["gamma"] for s in drafting), default=0)
    names = (*SCENE, "context", "budget", "policy", "position_mode", "gamma_mode", "refresh")
    return [
        (_where(first), permutation_test(*aligned(first.acceptance, second.acceptance), names=_names(first, second)))
        for _, group in grouped([s for s in drafting if s["gamma"] == gamma], names)
        for first, second in combinations({s["drafter_name"]: s for s in group}.values(), 2)
    ]


def _maker(series: Series) -> str:
    """The drafter, and the method where the drafter does not draft by itself."""
    name, method = series["drafter_name"], series["method"]
    return name if method in PLAIN else f"{method} with {name}"


def _where(series: Series) -> str:
    budget = "full cache" if series["budget"] == FULL_BUDGET else f"budget {series['budget']}, {series['policy']}"
    return f"{scene_of(series)}, {series['context']} tokens, {budget}, {series['position_mode']}"


def _names(first: Series, second: Series) -> tuple[str, str]:
    return first["drafter_name"], second["drafter_name"]
