"""The measured rates of docs/verdicts.md: documents drawn as they say, and figures that are those of the code."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bdcore.evaluation.degeneracy import distinct_n
from benchmarks.cases import Case, cases
from benchmarks.judgements import in_loops, of_gammas, of_speed, of_text, of_what_failed, with_failures
from benchmarks.truths import DRAFTED, LOOPING, draw, failing, looping, text, timed
from benchmarks.verdicts import markdown, measure

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


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_timed_documents_have_the_speedup_they_are_drawn_with():
    tables = np.array(timed(rng(), (0.8, 1.0, 1.5), 4000, 0.9))
    assert tables[..., 0].sum(1) / tables[..., 1].sum(1) == pytest.approx([0.8, 1.0, 1.5], rel=0.02)
    each = tables[..., 0] / tables[..., 1]
    assert each.std(1) / each.mean(1) == pytest.approx(0.27, abs=0.02)
    assert np.corrcoef(each)[0, 1] > 0.8


def test_loops_are_as_many_as_asked_for_and_nearly_all_accepted():
    tables, loops = (np.array(found) for found in looping((0.0, 0.25))(rng(), (0.3, 0.3), 4000, 0.5))
    assert loops.mean(1) == pytest.approx([0, 0.25], abs=0.02)
    shares = tables[..., 0] / tables[..., 1]
    assert shares[loops].mean() == pytest.approx(LOOPING, abs=0.01)
    assert shares[~loops].mean() == pytest.approx(0.3, abs=0.01)


def test_a_text_repeats_the_share_of_it_that_is_asked_for():
    for share, counter, expected in ((0.0, False, 1.0), (0.5, False, 0.53), (0.5, True, 0.76), (0.9, True, 0.54)):
        assert distinct_n(text(counter=counter)(rng(), (share,), 8, 0.0), 4) == pytest.approx(expected, abs=0.02)


def test_prompts_fail_at_random_or_the_weakest_first():
    whole = draw(rng(), (0.5, 0.5), 8, 0.5)
    weak = failing(0.5, settings=[1], weakest=True)(rng(), (0.5, 0.5), 8, 0.5)
    assert weak[0] == whole[0]
    kept = [pair for pair in weak[1] if pair[0] is not None]
    assert sorted(kept) == sorted(whole[1])[4:]
    some = failing(0.25, settings=range(2))(rng(), (0.5, 0.5), 8, 0.5)
    assert [sum(a is None for a, _ in row) for row in some] == [2, 2]


# Where the truth is far from every bound and the documents are many, a verdict is right.
MANY = 64


def test_the_speedup_is_below_1_where_it_is_and_nowhere_else():
    def found(*speedups: float) -> list[bool]:
        return list(of_speed(timed(rng(), speedups, MANY, 0.5), 0).values())

    assert found(1.5, 1.3, 1.3, 0.7) == [True, True]
    assert found(1.5, 1.4, 1.4, 1.3) == [False, False]


def test_the_best_gamma_is_upheld_where_it_is_best_and_refuted_where_it_is_slow():
    tables = timed(rng(), (1.0, 1.5, 1.0), MANY, 0.9)
    assert of_gammas((1.0, 1.3, 1.1))(tables, 0) == {"best gamma apart": False, "best gamma same": True}
    assert of_gammas((1.0, 1.1, 1.3))(tables, 0) == {"best gamma apart": True, "best gamma same": False}


def test_loops_hide_a_collapse_and_feign_one_unless_they_are_left_out():
    hidden = looping((0, 0, 0, 0.5))(rng(), (0.5, 0.4, 0.3, 0.06), MANY, 0.5)
    assert in_loops(hidden, 0) == {"collapsed, all texts": False, "collapsed, sound texts": True}
    feigned = looping((0.8, 0, 0, 0))(rng(), (0.2, 0.2, 0.2, 0.2), MANY, 0.5)
    assert in_loops(feigned, 0) == {"collapsed, all texts": True, "collapsed, sound texts": False}


def test_a_counter_hides_a_loop_of_half_a_text_but_not_of_nearly_all():
    judged = {(s, c): of_text(text(counter=c)(rng(), (s,), 8, 0.0), 0) for s in (0.0, 0.5, 0.9) for c in (False, True)}
    flagged = {key for key, found in judged.items() if found["degenerate"]}
    assert flagged == {(0.5, False), (0.9, False), (0.9, True)}


def test_failures_at_random_change_no_verdict_and_a_context_without_prompts_is_named():
    some, all_of_one = failing(0.25, settings=range(4)), failing(1.0, settings=[3])
    for levels, collapsed in (((0.5, 0.5, 0.5, 0.1), True), ((0.5, 0.5, 0.5, 0.45), False)):
        assert with_failures(some(rng(), levels, MANY, 0.5), 0) == {"collapsed, with failures": collapsed}
        assert of_what_failed(some(rng(), levels, MANY, 0.5), 0) == {"context named as not judged": False}
        assert of_what_failed(all_of_one(rng(), levels, MANY, 0.5), 0) == {"context named as not judged": True}


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


def test_every_verdict_has_a_rate_of_false_alarms_and_of_power():
    kinds: dict[str, set[str]] = {}
    for row in stored():
        kinds.setdefault(row["verdict"], set()).add(row["kind"])
    one_sided = {verdict for verdict, found in kinds.items() if found not in ({"false alarm", "power"}, {"coverage"})}
    assert one_sided == {"context named as not judged"}, "it follows from the rows: chance has no part in it"


def test_stored_rates_are_those_of_the_code():
    cheap = ("equal drafters", "10 points apart", "1.0x at 1 context", "no loop", "the last half loops with a counter")
    for case in (case for case in cases() if case.truth in cheap):
        rows = {r["verdict"]: r for r in stored() if r["truth"] == case.truth and r["documents"] == 8}
        again = measure(case, 8, next(iter(rows.values()))["repeats"])
        assert {r["verdict"] for r in again} == set(rows)
        for row in again:
            assert row["rate"] == pytest.approx(rows[row["verdict"]]["rate"], abs=0.01)
