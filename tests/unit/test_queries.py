"""The cookbook of docs/queries.md: every query answers on rows that give each question something to find."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bdcore.schema import SAMPLES
from reports.tables import query
from tests.unit.test_reports import failure, replayed, rounds, sample, store, store_rounds

COOKBOOK = (Path(__file__).parents[2] / "docs" / "queries.md").read_text()
QUESTIONS = dict(re.findall(r"^## (.*?)$\n+```sql\n(.*?)```", COOKBOOK, re.MULTILINE | re.DOTALL))


def study() -> Iterator[dict[str, Any]]:
    """Two drafters of which one fades with context, two budgets, a loop, a tie and a bug, a failed cell, a replay."""
    for doc in range(5):
        for context in (1024, 4096):
            place = {"doc": doc, "context": context}
            yield sample(method="ar", **place)
            for budget in (64, 128):
                fading = {1024: 30, 4096: 10}[context] + (budget == 128)
                base = {"method": "sd_sparse", "drafter_name": "base", "drafter_key": "d0", "budget": budget}
                trained = {"drafter_name": "trained", "drafter_key": "d1", "budget": budget}
                yield sample(**place, **base, accepted=fading, decode_s=1.0) | different(doc)
                yield sample(**place, **trained, accepted=32 - doc, decode_s=0.5, degenerate=doc == 0)
                yield replayed(**place, **trained, accepted=25)
    yield failure("out of memory", doc=9, context=4096)


def different(doc: int) -> dict[str, Any]:
    kind = {0: "tie", 1: "bug"}.get(doc)
    if kind is None:
        return {}
    return {
        "exact_match": False,
        "first_mismatch": 7 + doc,
        "mismatch_kind": kind,
        "mismatch_steps": 1.5 if doc == 0 else 90.0,
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cookbook")
    store(path, list(study()))
    store_rounds(path, rounds([(4, 1), (4, 4), (2, 2)]))
    return path


def answer(workspace: Path, question: str) -> list[dict[str, Any]]:
    (sql,) = (sql for title, sql in QUESTIONS.items() if question in title)
    columns, rows = query(workspace, sql)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_there_are_ten_questions_each_with_a_query_and_a_word_on_how_to_read_it():
    assert [title.split(".")[0] for title in QUESTIONS] == [str(i) for i in range(11)]
    after = re.findall(r"```\n\n(\S[^#]+)", COOKBOOK)
    assert len(after) == 11 and all(len(text.split()) > 10 for text in after)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_an_answer(measured, question):
    rows = answer(measured, question)
    assert rows
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))


COUNTS = ("new_tokens", "rounds", "drafted", "accepted", "far_rounds", "far_accepted", "drafter_cached_peak")
SECONDS = [name for name in SAMPLES.names if name.endswith("_s")]


@pytest.fixture(scope="module")
def nothing_measured(tmp_path_factory) -> Path:
    """Rows whose every denominator is 0, and some where only the drafts are not."""
    path = tmp_path_factory.mktemp("nothing")
    zeros = dict.fromkeys((*COUNTS, "drafter_kv_bytes_peak", "verifier_kv_bytes_peak"), 0) | dict.fromkeys(SECONDS, 0.0)
    cells = [("ar", -1), ("sd_sparse", 64), ("sd_sparse", 128), ("budgetdraft", 64), ("budgetdraft", 128)]
    rows = [
        sample(method=method, budget=budget, context=context) | zeros
        for method, budget in cells
        for context in (1024, 2048)
    ]
    rejected = [row | {"context": 4096, "drafted": 8} for row in rows if row["method"] != "ar"]
    store(path, [*rows, *rejected])
    store_rounds(path, rounds([(0, 0), (4, 0)]))
    return path


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_divides_by_zero(nothing_measured, question):
    for row in answer(nothing_measured, question):
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row


def test_the_answers_are_what_the_rows_say(measured):
    [failed] = answer(measured, "Did every cell run")
    assert (failed["method"], failed["context"], failed["budget"]) == ("budgetdraft", 4096, 64)
    assert (failed["failed"], failed["first_error"]) == (1, "out of memory")
    fading = [
        r
        for r in answer(measured, "the drafter die?")
        if (r["method"], r["budget"], r["workload"]) == ("sd_sparse", 64, "greedy")
    ]
    assert [(r["context"], r["kept"]) for r in fading] == [(1024, 1.0), (4096, 0.33)]
    best = answer(measured, "best at each context")[0]
    assert (best["method"], best["context"], best["decode_speedup"]) == ("budgetdraft", 1024, 4.0)
    worst = answer(measured, "lossless")[0]
    assert (worst["method"], worst["ties"], worst["bugs"], worst["equal"]) == ("sd_sparse", 2, 2, 6)
    assert (worst["earliest_token"], worst["widest_gap"]) == (7, 90.0)
    loops = answer(measured, "degenerate")[0]
    assert (loops["degenerate"], loops["acceptance"], loops["acceptance_sound"]) == (0.2, 0.75, 0.738)
    first = answer(measured, "budget matter")[0]
    assert (first["method"], first["context"]) == ("sd_sparse", 4096)
    assert (first["at_budget"], first["at_best_budget"]) == (64, 128)
    assert first["range_over_mean"] == pytest.approx(1 / 10.5, abs=1e-3)
    block = [r for r in answer(measured, "Where in a block") if r["workload"] == "greedy"]
    assert [r["given_before"] for r in block] == [1.0, 0.667, 1.0, 1.0]
    costs = {r["method"]: r for r in answer(measured, "token cost")}
    assert costs["ar"]["ms_per_token"] == 62.5 and costs["ar"]["verify"] == 0.95
    paired = next(r for r in answer(measured, "same documents") if (r["context"], r["budget"]) == (4096, 64))
    assert (paired["documents"], paired["base"], paired["trained"], paired["gain"]) == (5, 0.25, 0.75, 0.5)
    assert (paired["better"], paired["worse"]) == (5, 0)
    far = answer(measured, "far away")[0]
    assert (far["far_share"], far["far_acceptance"], far["acceptance"]) == (0.4, 0.25, 0.625)
    memory = answer(measured, "memory")[0]
    assert (memory["drafter_mib"], memory["verifier_mib"], memory["of_verifier"]) == (1.0, 16.0, 0.0625)
