"""The cells of the grid as data: planned and counted before anything runs."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from bdcore.config import Exclusion, GridConfig
from bdcore.decoding.methods import METHODS, Method
from bdcore.identity import digest
from bdcore.kv.budget import FULL, FULL_POLICY, STORES_ALL

GREEDY, SAMPLED, REPLAY = "greedy", "sampled", "replay"
WRITTEN = (GREEDY, SAMPLED)
"""Workloads that generate text, one prompt at a time."""


def writes(grid: GridConfig) -> bool:
    """Whether any workload generates text."""
    return any(workload in WRITTEN for workload in grid.workloads)


@dataclass(frozen=True)
class Cell:
    """One method under one setting. Cells of one context share their prompts."""

    method: str
    context: int
    budget: int
    policy: str
    position_mode: str
    gamma: int
    gamma_mode: str = "fixed"
    refresh: int = 0
    workload: str = GREEDY
    drafter: str | None = None
    """Name of the drafter; None: no model drafts."""
    temperature: float = 0.0

    @property
    def key(self) -> str:
        return digest(asdict(self))

    @property
    def how(self) -> Method:
        """The method's entry."""
        return METHODS[self.method]


def cells(grid: GridConfig) -> list[Cell]:
    """Every cell that is not excluded: `greedy`, `sampled`, then `replay`, context by context, `ar` first in each."""
    methods = sorted(grid.methods, key=list(METHODS).index)
    temperatures = {GREEDY: [0.0], SAMPLED: grid.temperatures, REPLAY: [0.0]}
    workloads = [w for w in temperatures if w in grid.workloads]
    return [
        cell
        for workload in workloads
        for context, temperature in product(grid.contexts, temperatures[workload])
        for name in methods
        for cell in _method_cells(grid, METHODS[name], workload, context, temperature)
        if not any(_excluded(cell, rule) for rule in grid.exclude)
    ]


def unused_exclusions(grid: GridConfig) -> list[Exclusion]:
    """Exclusions that no cell of the grid meets: most likely a slip."""
    every = cells(grid.model_copy(update={"exclude": []}))
    return [rule for rule in grid.exclude if not any(_excluded(cell, rule) for cell in every)]


def _excluded(cell: Cell, rule: Exclusion) -> bool:
    """Whether a cell meets every entry of an exclusion. `ar` stays: everything else is measured against it."""
    if cell.how.alone:
        return False
    return all(getattr(cell, name) in values for name, values in rule.items())


def _method_cells(grid: GridConfig, method: Method, workload: str, context: int, temperature: float) -> list[Cell]:
    if workload not in method.workloads:
        return []
    if method.alone:
        alone = Cell(method.name, context, FULL, FULL_POLICY, "absolute", 0)
        return [replace(alone, workload=workload, temperature=temperature)]
    mode = grid.gamma_mode if grid.gamma_mode in method.gamma_modes else "fixed"
    return [
        Cell(
            method.name,
            context,
            *cache,
            gamma,
            gamma_mode=mode,
            refresh=0 if cache[0] == FULL or cache[1] in STORES_ALL else grid.refresh,
            workload=workload,
            drafter=drafter,
            temperature=temperature,
        )
        for drafter in drafters_of(grid, method)
        for cache in _caches(grid, method)
        for gamma in grid.gammas
    ]


def drafters_of(grid: GridConfig, method: Method) -> list[str | None]:
    """Names of the drafters a method is measured with; [None] where no model drafts."""
    return [method.drafter, *(grid.drafters if method.drafter == "trained" else [])]


def _caches(grid: GridConfig, method: Method) -> list[tuple[int, str, str]]:
    """(budget, policy, position mode): sparse ones in every combination, the full cache once and last."""
    sparse = [budget for budget in grid.budgets if method.sparse and budget != FULL]
    policies = [method.policy] if method.policy else grid.policy
    modes = [method.position_mode] if method.position_mode else grid.position_mode
    found = [(budget, policy, mode) for policy, mode, budget in product(policies, modes, sparse)]
    full = method.full and (FULL in grid.budgets or not method.sparse)
    return [*found, (FULL, FULL_POLICY, "absolute")] if full else found


def context_facts(grid: GridConfig) -> dict[str, Any]:
    """Counts for plans and progress."""
    every = cells(grid)
    return {
        "cells": len(every),
        "contexts": len(grid.contexts),
        "samples": len(every) * grid.prompts * len(grid.corpus),
    }
