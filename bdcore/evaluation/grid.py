"""The cells of the grid as data: planned and counted before anything runs."""

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from bdcore.config import GridConfig
from bdcore.decoding.methods import METHODS, Method
from bdcore.identity import digest
from bdcore.kv.budget import FULL, FULL_POLICY

GREEDY, REPLAY = "greedy", "replay"


@dataclass(frozen=True)
class Cell:
    """One method under one setting. Cells of one workload and context share their prompts."""

    method: str
    context: int
    budget: int
    policy: str
    position_mode: str
    gamma: int
    gamma_mode: str = "fixed"
    refresh: int = 0
    workload: str = GREEDY

    @property
    def key(self) -> str:
        return digest(asdict(self))

    @property
    def drafter(self) -> str | None:
        return METHODS[self.method].drafter

    @property
    def lookup(self) -> bool:
        return METHODS[self.method].lookup


def cells(grid: GridConfig) -> list[Cell]:
    """Every cell, `greedy` before `replay`, context by context, `ar` first in each context of `greedy`."""
    methods = sorted(grid.methods, key=list(METHODS).index)
    workloads = [w for w in (GREEDY, REPLAY) if w in grid.workloads]
    return [
        cell
        for workload, context, name in product(workloads, grid.contexts, methods)
        for cell in _method_cells(grid, METHODS[name], workload, context)
    ]


def _method_cells(grid: GridConfig, method: Method, workload: str, context: int) -> list[Cell]:
    if method.drafter is None and not method.lookup:
        alone = Cell(method.name, context, FULL, FULL_POLICY, "absolute", 0)
        return [alone] if workload == GREEDY else []
    # A lookup has no probability of what it drafts.
    mode = "fixed" if method.lookup and grid.gamma_mode == "confidence" else grid.gamma_mode
    return [
        Cell(method.name, context, *cache, gamma, mode, 0 if cache[0] == FULL else grid.refresh, workload)
        for cache in _caches(grid, method)
        for gamma in grid.gammas
    ]


def _caches(grid: GridConfig, method: Method) -> list[tuple[int, str, str]]:
    """(budget, policy, position mode): sparse ones in every combination, the full cache once and last."""
    sparse = [budget for budget in grid.budgets if method.sparse and budget != FULL]
    found = [(budget, policy, mode) for policy, mode, budget in product(grid.policy, grid.position_mode, sparse)]
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
