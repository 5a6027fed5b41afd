"""The measured rates of docs/verdicts.md: documents drawn as they say, and figures that are those of the code."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.verdicts import DRAFTED, Case, cases, draw, markdown, measure

ROOT = Path(__file__).parents[2]


def stored():
    with (ROOT / "docs/results/verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    numbers = ("nominal", "rate", "error")
    return [
        {k: (float(v) if v else None) if k in numbers else int(v) if v.isdecimal() else v for k, v in row.items()}
        for row in rows
    ]


def test_documents_have_the_acceptance_and_the_correlation_they_are_drawn_with():
    tables = draw(np.random.default_rng(0), (0.45, 0.2, 0.2), 4000, 0.9)
    shares = np.array([[a / b for a, b in row] for row in tables])
    assert shares.mean(axis=1) == pytest.approx([0.45, 0.2, 0.2], abs=0.01)
    # A beta of concentration 6 and 16 binomial draws: var = p (1 - p) (1 / 16 + 15 / 16 / 7).
    assert shares.var(axis=1) == pytest.approx([v * (1 / 16 + 15 / 16 / 7) for v in (0.2475, 0.16, 0.16)], rel=0.08)
    apart = draw(np.random.default_rng(0), (0.2, 0.2), 4000, 0.0)
    joined, free = (np.corrcoef(np.array(t)[-2:, :, 0])[0, 1] for t in (tables, apart))
    assert abs(free) < 0.05 < 0.5 < joined < 0.9
    assert {b for row in tables for _, b in row} == {float(DRAFTED)}


def test_rates_count_what_was_judged():
    found = {"a": [True, False, True, True], "interval of b": [None, True, None, False]}
    case = Case("t", (0.5,), 0.0, lambda _, seed: {k: v[seed] for k, v in found.items()}, frozenset("a"))
    given, covered = measure(case, 8, 4)
    assert (given["kind"], given["rate"], given["judged"], given["nominal"]) == ("power", 0.75, 4, None)
    assert (covered["kind"], covered["rate"], covered["judged"], covered["nominal"]) == ("coverage", 0.5, 2, 0.95)


def test_the_document_holds_the_table_of_the_stored_rates():
    assert markdown(stored()) in (ROOT / "docs/verdicts.md").read_text()


def test_every_case_is_stored():
    found = {(row["truth"], row["documents"]) for row in stored()}
    assert found == {(case.truth, n) for case in cases() for n in (4, 8, 16, 32)}


def test_stored_rates_are_those_of_the_code():
    cheap = [case for case in cases() if case.truth in ("equal drafters", "10 points apart")]
    for case in cheap:
        [row] = [r for r in stored() if r["truth"] == case.truth and r["documents"] == 8]
        [again] = measure(case, 8, row["repeats"])
        assert again["rate"] == pytest.approx(row["rate"], abs=0.01)
