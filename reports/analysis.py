"""The analysis of a run: what was found, and the sections that tell it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import duckdb

from bdcore.collapse import SpeedupCollapse, speedup_boundaries
from reports import sections
from reports.breakeven import Worth, worth
from reports.budget_tests import BudgetTest, budget_tests
from reports.deaths import Deaths, deaths
from reports.measured import Measured
from reports.needles import Needles, needles
from reports.section import Section
from reports.series import per_document
from reports.swaps import Swaps, attributions
from reports.upper import Upper, upper_envelope


@dataclass(frozen=True)
class Analysis:
    sections: list[Section]
    """Those that have rows."""
    swaps: list[Swaps]
    worth: list[Worth]
    deaths: list[Deaths]
    needles: list[Needles]
    speedups: list[SpeedupCollapse]
    budgets: list[BudgetTest]
    upper: list[Upper]


def analyse(
    connection: duckdb.DuckDBPyConnection, run_key: str, cells: Sequence[Measured], answers: Mapping[str, str]
) -> Analysis:
    """`answers`: document -> what the needle says that it asks for."""
    series = per_document(connection, run_key)
    swaps, paying, died = attributions(series), worth(connection, run_key, series), deaths(connection, run_key)
    hidden = needles(connection, run_key, answers)
    speedups, budgets = speedup_boundaries(c.cell() for c in cells), budget_tests(series)
    upper = upper_envelope(series)
    made = [
        sections.of_speedups(speedups),
        sections.of_attribution(swaps),
        sections.of_ceilings(series),
        sections.of_budgets(budgets),
        sections.of_upper(upper),
        sections.of_drafters(series),
        sections.of_deaths(died),
        sections.of_needles(hidden),
        sections.of_break_even(paying),
    ]
    shown = [section for section in made if section.rows]
    return Analysis(shown, swaps, paying, died, hidden, speedups, budgets, upper)
