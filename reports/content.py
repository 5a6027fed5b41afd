"""What a report says about one run, as plain values for the templates. All of it comes from rows or from `facts`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import duckdb

from bdcore.collapse import (
    MIN_PROMPTS,
    BudgetEffect,
    Collapse,
    budget_effects,
    collapse_boundaries,
    headlines,
)
from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES
from bdcore.collapse.verdicts import SHARE
from reports.analysis import Analysis, analyse
from reports.charts import analysis_figures
from reports.comparison import beside_paper
from reports.facts import fact_tables
from reports.figures import all_figures
from reports.labels import counted
from reports.measured import Measured, measure
from reports.missing import missing
from reports.outputs import side_by_side
from reports.phases import PHASES
from reports.tables import records

FAILURES_SHOWN = 200
"""Failed samples listed in the report; `tables/failed.csv` has them all."""
SKIPPED_SHOWN = 5
DEFINITIONS = (
    "Acceptance is accepted / drafted tokens. Tokens per round include the verifier's own token, one per round.",
    "Speedups are ratios of summed seconds of `ar`, the verifier alone, on the same prompts in the same process: "
    + "decode speedup without the prefill, end-to-end speedup with it. TTFT is the mean time to the first token.",
    "Every ratio is a ratio of sums over prompts. Brackets hold the "
    + f"{100 * CONFIDENCE:.0f} % bootstrap interval over prompts (BCa where it is defined, else percentile; "
    + f"{RESAMPLES} resamples, fixed seed). One prompt, or prompts that all agree, give no interval: not certainty.",
    f"Collapse: acceptance below {100 * SHARE:.0f} % of its value at the shortest context, at equal method, setting, "
    + "budget and gamma. `collapsed` when the whole interval is below, `likely` when the point alone is. Acceptance "
    + "falls with gamma by arithmetic, so gammas are never compared. "
    + f"Fewer than {MIN_PROMPTS} prompts give no verdict.",
    "No effect of the budget: one value of acceptance lies in the intervals of all budgets at that context and gamma.",
    "Degenerate: the output repeats itself (loop flag of the sample). Sound: the others.",
    "Workloads. `greedy`: the verifier's own greedy continuation of a prompt. `replay`: along human text; at spaced "
    + "positions drafts are checked against the verifier's greedy choices, then the text goes on. A replay is not "
    + "timed, and its tokens per round are what a round at such a position would give.",
    "Far-dependent: the verifier's greedy token is another one when it sees its newest tokens alone (as many as "
    + "`far_window`). Its acceptance is that of the first draft.",
    "Budget: keys per layer and head that a drafter may cache; under the policies `retrieval` and `retrieval_ahead` "
    + "those that it reads, chosen before every round, while all stay stored.",
    "Exact k/n: of n compared outputs, k equal the verifier's own token for token. "
    + "Budget full (-1 in the tables): all keys kept. `-`: undefined or not recorded.",
)

_FRONTIER = """
SELECT * FROM frontier WHERE run_key = ? ORDER BY corpus, workload, temperature, context, decode_speedup DESC, method
"""

_FAILED = """
SELECT method, drafter_name, corpus, workload, temperature, context, budget, policy, position_mode, gamma, doc_id, error
FROM samples WHERE run_key = ? AND status <> 'ok' ORDER BY ALL
"""


def gather(connection: duckdb.DuckDBPyConnection, run_key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the templates show, for one run."""
    cells = measure(connection, run_key)
    collapses = collapse_boundaries(c.cell() for c in cells)
    effects = budget_effects(c.cell() for c in _one_axis(cells))
    failed = records(connection, _FAILED, [run_key])
    partial = missing(connection, run_key, facts)
    skipped = records(connection, "SELECT file, reason FROM skipped_files ORDER BY file")
    analysis = analyse(connection, run_key, cells, facts.get("answers") or {})
    paper = beside_paper(connection, run_key, wanted=bool(facts.get("paper")))
    return {
        "study": str(facts.get("study") or "study"),
        "run_key": run_key,
        "cells": cells,
        "written": [c for c in cells if c.row["workload"] != "replay"],
        "far": [c for c in cells if c.row["far_rounds"] is not None],
        "headlines": headlines(collapses),
        "collapses": collapses,
        "effects": effects,
        "notes": [*partial["notes"], *_skipped(skipped), *_notes(cells, failed, collapses, effects, analysis)],
        "missing": partial["cells"],
        "skipped": skipped,
        "frontier": records(connection, _FRONTIER, [run_key]),
        "failed": failed,
        "failures_shown": FAILURES_SHOWN,
        "pairs": side_by_side(connection, run_key),
        "drawings": [
            *all_figures(cells, facts.get("training") or {}),
            *analysis_figures(cells, analysis),
        ],
        "analysis": analysis.sections,
        "phases": list(PHASES.values()),
        "phase_columns": [(f"{phase} (%)", True) for phase in PHASES.values()],
        "phase_rows": _phase_rows(c for c in cells if c.row["workload"] != "replay"),
        "paper": paper,
        "definitions": [*DEFINITIONS, *_short(facts.get("texts")), *([] if paper["shown"] else [paper["note"]])],
        "facts": fact_tables(facts),
    }


def _one_axis(cells: Sequence[Measured]) -> list[Measured]:
    """Without full caches where a method's sparse ones are in-cache: those are no larger budget of them."""
    moved = {c.row["method"] for c in cells if c.row["position_mode"] == "in_cache"}
    return [c for c in cells if c.row["budget"] > 0 or c.row["method"] not in moved]


def _short(texts: Mapping[str, Any] | None) -> list[str]:
    """What became of documents that are too short for the grid."""
    if not texts:
        return []
    passed = ", ".join(f"{count} of {source}" for source, count in texts["too_short"].items())
    text = f"Documents too short for the {texts['tokens']} tokens of the grid are counted, never joined; passed over: "
    return [f"{text}{passed}."]


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> list[str]:
    if not skipped:
        return []
    named = "; ".join(f"{row['file']} ({row['reason']})" for row in skipped[:SKIPPED_SHOWN])
    more = f"; and {len(skipped) - SKIPPED_SHOWN} more" if len(skipped) > SKIPPED_SHOWN else ""
    what = counted(len(skipped), "damaged file")
    return [f"{what} left out: {named}{more}. A rerun of the grid measures their prompts again."]


def _notes(
    cells: Sequence[Measured],
    failed: Sequence[Any],
    collapses: Sequence[Collapse],
    effects: Sequence[BudgetEffect],
    analysis: Analysis,
) -> list[str]:
    """Sentences that qualify the verdict: failures, speed, exactness, degenerate text, budget."""
    notes = [f"{counted(len(failed), 'sample')} failed: listed below, counted nowhere else."] if failed else []
    if speedups := analysis.speedups:
        slower, likely = (sum(s.status == status for s in speedups) for status in ("collapsed", "likely"))
        notes.append(
            f"Decoding is slower than the verifier alone at some context in {slower} of {len(speedups)} series, and "
            f"likely so in {likely} more."
        )
    notes += _budget_note(effects, analysis)
    drafting = [c.row for c in cells if c.row["gamma"] > 0]
    checked, exact = sum(r["exact_checked"] for r in drafting), sum(r["exact_matches"] for r in drafting)
    if checked:
        ties = sum(r["ties"] for r in drafting)
        differ = checked - exact
        why = f" {ties} of the {differ} that differ do so at a near-tie of rounding." if differ else ""
        notes.append(f"{exact} of {checked} checked outputs are token for token those of the verifier alone.{why}")
    written = [r for r in drafting if r["workload"] != "replay"]
    rows, looping = sum(r["n"] for r in written), sum(r["degenerate"] for r in written)
    if looping:
        sound = collapse_boundaries(c.cell(sound=True) for c in cells)
        changed = sum(one.status != other.status for one, other in zip(collapses, sound, strict=True))
        notes.append(
            f"{looping} of {rows} outputs are degenerate (loops), and acceptance on them says little. "
            f"Without them {changed} of {counted(len(collapses), 'collapse verdict')} would be different."
        )
    return notes


def _budget_note(effects: Sequence[BudgetEffect], analysis: Analysis) -> list[str]:
    """By the tests over the same documents, which see more than intervals side by side, where they can judge."""
    if tests := [t for t in analysis.budgets if t.sensitivity.p_value is not None]:
        matters = sum(t.sensitivity.status == "sensitive" for t in tests)
        worse = sum(t.monotonicity.status == "dip" for t in tests)
        compared = counted(len(tests), "comparison")
        return [f"The budget matters in {matters} of {compared} over the same documents; more is worse in {worse}."]
    same = sum(e.status == "no effect" for e in effects)
    text = f"Budget has no effect within the intervals in {same} of {len(effects)} comparisons at equal gamma."
    return [text] if effects else []


def _phase_rows(cells: Iterable[Measured]) -> list[dict[str, Any]]:
    """Cells with the share of each phase in their decode seconds; None where nothing was timed."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        seconds = [cell.row[phase] or 0.0 for phase in PHASES]
        whole = sum(seconds)
        found.append({"cell": cell, "shares": [s / whole if whole else None for s in seconds]})
    return found
