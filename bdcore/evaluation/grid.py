"""The cells of the grid as data: planned and counted before anything runs."""

from dataclasses import asdict, dataclass
from typing import Any

from bdcore.config import GridConfig
from bdcore.decoding.methods import METHODS
from bdcore.identity import digest
from bdcore.kv.budget import FULL, FULL_POLICY


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

    @property
    def key(self) -> str:
        return digest(asdict(self))

    @property
    def drafter(self) -> str | None:
        return METHODS[self.method].drafter


def cells(grid: GridConfig) -> list[Cell]:
    """Every cell, context by context, `ar` first in each."""
    ordered = sorted(grid.methods, key=list(METHODS).index)
    return [cell for context in grid.contexts for name in ordered for cell in _method_cells(grid, name, context)]


def _method_cells(grid: GridConfig, name: str, context: int) -> list[Cell]:
    method = METHODS[name]
    if method.drafter is None:
        return [Cell(name, context, FULL, FULL_POLICY, "absolute", 0)]
    budgets = [b for b in grid.budgets if (method.sparse and b != FULL) or (method.full and b == FULL)]
    if not method.sparse:
        budgets = [FULL]
    return [
        Cell(
            name,
            context,
            budget,
            FULL_POLICY if budget == FULL else grid.policy,
            grid.position_mode,
            gamma,
            grid.gamma_mode,
            0 if budget == FULL else grid.refresh,
        )
        for budget in budgets
        for gamma in grid.gammas
    ]


def context_facts(grid: GridConfig) -> dict[str, Any]:
    """Counts for plans and progress."""
    every = cells(grid)
    return {"cells": len(every), "contexts": len(grid.contexts), "samples": len(every) * grid.prompts}
