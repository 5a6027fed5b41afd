"""What a report says about one run, as plain values for the templates. All of it comes from rows or from `facts`."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import duckdb
import numpy as np

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
from reports.figures import PHASES, all_figures
from reports.measured import Measured, measure
from reports.tables import CELL_KEYS, records

TEXT_LIMIT = 1500
"""Characters shown of a sample's output."""
FAILURES_SHOWN = 200
"""Failed samples listed in the report; `tables/failed.csv` has them all."""
SKIPPED_SHOWN = 5
NOT_TABULATED = ("study", "training", "expected_samples", "planned", "paper", "answers", "texts")
"""Keys of `facts` that have a place of their own in the report."""

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

_PAIRS = """
SELECT m.method, m.corpus, m.workload, m.doc_id, m.context, m.budget, m.gamma, m.exact_match, m.first_mismatch,
  m.degenerate, m.distinct_4, m.accepted, m.new_tokens, a.filename AS ar_file, a.file_row_number AS ar_row,
  m.filename AS method_file, m.file_row_number AS method_row
FROM samples m JOIN samples a
  ON a.run_key = m.run_key AND a.method = 'ar' AND a.corpus = m.corpus AND a.workload = m.workload
  AND a.temperature IS NOT DISTINCT FROM m.temperature AND a.context = m.context AND a.doc_id = m.doc_id
WHERE m.run_key = ? AND m.method <> 'ar' AND m.new_tokens IS NOT NULL AND a.new_tokens IS NOT NULL
QUALIFY row_number() OVER (
  PARTITION BY m.doc_id ORDER BY coalesce(m.exact_match, false), m.method = 'budgetdraft' DESC, m.context DESC,
    m.method, m.budget, m.gamma) = 1
ORDER BY coalesce(m.exact_match, false), m.degenerate, m.context, m.doc_id LIMIT 3
"""

# All columns: rows of an older version have no `accepted_spans`.
_TEXT = "SELECT * FROM read_parquet(?, file_row_number = true) WHERE file_row_number = ?"

# Every series of the run is wanted on every prompt that any series of its corpus and workload was given.
_MISSING = """
WITH mine AS (SELECT * FROM samples WHERE run_key = ?),
prompts AS (SELECT DISTINCT corpus, workload, context, doc_id FROM mine),
series AS (SELECT DISTINCT corpus, workload, method, drafter_name, policy, position_mode, budget, gamma FROM mine)
SELECT s.method, s.drafter_name, s.corpus, s.workload, p.context, s.budget, s.policy, s.position_mode, s.gamma,
  count(*) AS missing
FROM series s JOIN prompts p USING (corpus, workload)
WHERE NOT EXISTS (SELECT 1 FROM mine m WHERE m.doc_id = p.doc_id AND m.context = p.context AND m.corpus = s.corpus
  AND m.workload = s.workload AND m.method = s.method AND m.budget = s.budget AND m.gamma = s.gamma
  AND m.policy = s.policy AND m.position_mode = s.position_mode AND m.drafter_name IS NOT DISTINCT FROM s.drafter_name)
GROUP BY ALL ORDER BY ALL
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
        "pairs": _pairs(connection, run_key),
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


def missing(connection: duckdb.DuckDBPyConnection, run_key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Which cells lack prompts, and a note when the grid is not whole.

    By `planned` where the facts have it; else a cell is missing what other cells of the run have.
    """
    present = records(connection, "SELECT count(*) AS n FROM samples WHERE run_key = ?", [run_key])[0]["n"]
    expected = facts.get("expected_samples")
    if expected is not None and present >= expected:
        return {"notes": [], "cells": []}
    planned = facts.get("planned")
    cells = _unmeasured(connection, run_key, planned) if planned else records(connection, _MISSING, [run_key])
    if expected is not None:
        note = f"This run is partial: {present} of {expected} samples are there, {expected - present} are missing."
        return {"notes": [note], "cells": cells}
    if not cells:
        return {"notes": [], "cells": []}
    prompts = _count(sum(c["missing"] for c in cells), "prompt")
    note = f"This run is partial: {prompts} of {_count(len(cells), 'cell')} not measured."
    return {"notes": [note], "cells": cells}


def _unmeasured(
    connection: duckdb.DuckDBPyConnection, run_key: str, planned: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The planned cells that have fewer rows than prompts, as many as `missing` of each."""
    keys = [name for name in CELL_KEYS if name in planned[0]]
    wanted: Counter[tuple[Any, ...]] = Counter()
    for cell in planned:
        wanted[_cell(cell, keys)] += cell["prompts"]
    for row in records(connection, "SELECT * FROM cells WHERE run_key = ?", [run_key]):
        wanted[_cell(row, keys)] -= row["n"] + row["failed"]
    return [dict(zip(keys, key, strict=True)) | {"missing": count} for key, count in wanted.items() if count > 0]


def _cell(row: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """What tells cells apart; a temperature of 0.8 is stored as the nearest float32."""
    return tuple(float(np.float32(row[k])) if isinstance(row[k], float) else row[k] for k in keys)


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
    what = _count(len(skipped), "damaged file")
    return [f"{what} left out: {named}{more}. A rerun of the grid measures their prompts again."]


def _notes(
    cells: Sequence[Measured],
    failed: Sequence[Any],
    collapses: Sequence[Collapse],
    effects: Sequence[BudgetEffect],
    analysis: Analysis,
) -> list[str]:
    """Sentences that qualify the verdict: failures, speed, exactness, degenerate text, budget."""
    notes = [f"{_count(len(failed), 'sample')} failed: listed below, counted nowhere else."] if failed else []
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
            f"Without them {changed} of {_count(len(collapses), 'collapse verdict')} would be different."
        )
    return notes


def _budget_note(effects: Sequence[BudgetEffect], analysis: Analysis) -> list[str]:
    """By the tests over the same documents, which see more than intervals side by side, where they can judge."""
    if tests := [t for t in analysis.budgets if t.sensitivity.p_value is not None]:
        matters = sum(t.sensitivity.status == "sensitive" for t in tests)
        worse = sum(t.monotonicity.status == "dip" for t in tests)
        compared = _count(len(tests), "comparison")
        return [f"The budget matters in {matters} of {compared} over the same documents; more is worse in {worse}."]
    same = sum(e.status == "no effect" for e in effects)
    text = f"Budget has no effect within the intervals in {same} of {len(effects)} comparisons at equal gamma."
    return [text] if effects else []


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _phase_rows(cells: Iterable[Measured]) -> list[dict[str, Any]]:
    """Cells with the share of each phase in their decode seconds; None where nothing was timed."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        seconds = [cell.row[phase] or 0.0 for phase in PHASES]
        whole = sum(seconds)
        found.append({"cell": cell, "shares": [s / whole if whole else None for s in seconds]})
    return found


def _pairs(connection: duckdb.DuckDBPyConnection, run_key: str) -> list[dict[str, Any]]:
    """Outputs beside those of the verifier alone; the texts are read from the few files that hold them."""
    found: list[dict[str, Any]] = []
    for pair in records(connection, _PAIRS, [run_key]):
        sides = {
            side: records(connection, _TEXT, [pair[f"{side}_file"], pair[f"{side}_row"]])[0]
            for side in ("ar", "method")
        }
        if all(side["output_text"] is not None for side in sides.values()):
            found.append(
                pair
                | {f"{n}_pieces": _pieces(s["output_text"], s.get("accepted_spans") or []) for n, s in sides.items()}
            )
    return found


def _pieces(text: str, spans: Sequence[int]) -> list[tuple[str, bool]]:
    """A text in pieces, each with whether it is accepted drafts; cut where it is long."""
    shown = min(len(text), TEXT_LIMIT)
    # A character in the making is shorter as text than its first bytes alone: ends may seem to step back.
    edges = list(accumulate([0, *(min(edge, shown) for edge in spans), shown], max))
    pieces = [(text[start:end], i % 2 == 1) for i, (start, end) in enumerate(pairwise(edges))]
    more = len(text) - TEXT_LIMIT
    tail = [(f" [... {more} more characters]", False)] if more > 0 else []
    return [piece for piece in [*pieces, *tail] if piece[0]]


def fact_tables(facts: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """`facts` as titled lists of (dotted key, value): one per nested entry, plain entries first under `run`."""
    shown = {key: value for key, value in facts.items() if key not in NOT_TABULATED}
    plain = [(key, _text(value)) for key, value in shown.items() if not isinstance(value, Mapping)]
    nested = [(key, list(_flat(value))) for key, value in shown.items() if isinstance(value, Mapping) and value]
    return [("run", plain), *nested] if plain else nested


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _text(item)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool | int | float | str):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(item, bool | int | float | str) for item in value):
        return ", ".join(map(str, value)) or "-"
    return json.dumps(value, default=str)
