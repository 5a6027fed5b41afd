"""What must not be added up: corpora, methods that share a drafter, position modes, cells of a partial run."""

import csv

import numpy as np
import pytest

from bdcore.collapse import Estimate, budget_effects
from bdcore.collapse.cells import Cell
from reports.budget_tests import budget_tests, drafter_tests
from reports.build import build_report
from reports.series import Series
from reports.studies import named
from reports.swaps import attributions
from reports.tables import query
from tests.unit.test_reports import RUN, rounds, sample, store, store_rounds


@pytest.fixture
def workspace(tmp_path):
    path = tmp_path / "workspace"
    path.mkdir()
    return path


SETTING = {"corpus": "stdlib", "workload": "replay", "temperature": 0.0, "gamma_mode": "fixed", "refresh": 0}


def series(method: str, budget: int, rate: int, *, drafter: str = "base", docs: int = 8, **changes) -> Series:
    """One cell of `docs` documents, each with `rate` of 100 drafts accepted, more or less."""
    cell = SETTING | {
        "method": method, "drafter_name": drafter, "context": 4096, "budget": budget, "gamma": 1,
        "policy": "attention_mass" if budget > 0 else "full", "position_mode": "absolute",
    } | changes  # fmt: skip
    wobble = np.random.default_rng([budget + 1, len(method)]).permutation(docs) - (docs - 1) / 2  # adds up to 0
    sums = {f"doc-{i}": (rate + float(w), 100.0) for i, w in enumerate(wobble)}
    return Series(cell, sums, dict.fromkeys(sums, (None, None)))


def test_acceptance_by_position_is_of_one_corpus(workspace):
    store(workspace, [sample(doc=0), sample(doc=1, corpus="pg19")])
    other = [row | {"doc_id": "doc-1"} for row in rounds([(4, 0), (4, 0)])]
    store_rounds(workspace, [*rounds([(4, 4), (4, 4)]), *other])
    _, found = query(workspace, "SELECT corpus, acceptance FROM positions WHERE position = 1 ORDER BY corpus")
    assert found == [("pg19", 0.0), ("stdlib", 1.0)]


def test_what_pays_is_said_of_one_corpus(workspace, tmp_path):
    """A corpus on which everything is accepted and one on which nothing is: 5 tokens per round, and 1."""
    same = {"rounds": 10, "drafted": 40, "draft_s": 0.1, "verify_s": 0.5}
    places = [(doc, "stdlib" if doc < 4 else "pg19") for doc in range(8)]
    store(workspace, [
        sample(doc=doc, corpus=corpus, accepted=40 if corpus == "stdlib" else 0, **same) for doc, corpus in places
    ])  # fmt: skip
    found = [(doc, row) for doc, corpus in places for row in rounds([(4, 4 if corpus == "stdlib" else 0)] * 10)]
    store_rounds(workspace, [row | {"doc_id": f"doc-{doc}"} for doc, row in found])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    rows = {row["setting"].split(",")[0]: row for row in csv.DictReader(paths["tables/break-even.csv"].open())}
    fast, slow = (float(rows[f"greedy on {name}"]["expected_x"].split(": ")[1]) for name in ("stdlib", "pg19"))
    assert fast == pytest.approx(5 * slow, rel=0.02)  # two decimals are shown


def test_methods_that_share_a_drafter_are_tested_apart():
    rising = [series("sd_sparse", budget, rate) for budget, rate in ((64, 25), (256, 50))]
    flat = [series("triforce", budget, 95) for budget in (64, 256)]
    found = {test.name.split(", ")[1]: test for test in budget_tests([*rising, *flat])}
    assert found["base"].sensitivity.status == "sensitive"
    assert found["base"].sensitivity.spread.value == pytest.approx(25 / 37.5, abs=0.01)
    assert found["triforce with base"].sensitivity.spread.value == pytest.approx(0.0, abs=1e-9)


def test_a_drafter_is_never_compared_with_itself():
    pair = [series("sd_sparse", 64, 25), series("triforce", 64, 95), series("hf_assisted", -1, 95)]
    assert drafter_tests(pair) == []
    [(_, test)] = drafter_tests([*pair, series("budgetdraft", 64, 40, drafter="trained")])
    assert test.difference == pytest.approx(-0.15)


def test_the_full_cache_is_no_larger_budget_of_in_cache_positions():
    flat = [series("budgetdraft", budget, 40 + i, position_mode="in_cache") for i, budget in enumerate((64, 256))]
    [test] = budget_tests([*flat, series("budgetdraft", -1, 5)])
    assert test.monotonicity.status == "monotone"
    [test] = budget_tests([*(series("budgetdraft", b, 40) for b in (64, 256)), series("budgetdraft", -1, 5)])
    assert test.monotonicity.status == "dip"


def test_swaps_are_those_of_the_drafter_alone():
    found = [
        series("sd_full", -1, 60, context=512), series("triforce", 256, 99), series("sd_sparse", 256, 10),
        series("sd_sparse", 256, 40, position_mode="in_cache"), series("sd_sparse", 256, 20, policy="random"),
        series("hf_assisted", -1, 99, context=512),
    ]  # fmt: skip
    [one] = attributions(found)
    assert one.found.lost.value == pytest.approx(0.5)


def test_studies_do_not_add_up_methods_of_one_drafter():
    runs = {RUN: {"created": "1", "finished": True, "study": "cpu", "protocol": "p"}}
    rows = [
        sample(method=method, drafter_name="base", accepted=accepted)
        for method, accepted in (("sd_sparse", 10), ("triforce", 38))
    ]
    assert {row["drafter"]: row["accepted"] for row in named(rows, runs)} == {"base": 10, "triforce": 38}


def test_a_partial_run_misses_only_what_is_missing(workspace, tmp_path):
    """A temperature of 0.8 is stored as a float32, which is another number."""
    same = {"workload": "sampled", "temperature": 0.8}
    store(workspace, [sample(doc=doc, **same) for doc in range(3)])
    row = sample(**same)
    names = (
        "method",
        "drafter_name",
        "corpus",
        "workload",
        "temperature",
        "context",
        "budget",
        "policy",
        "position_mode",
        "gamma",
    )
    planned = [{name: row[name] for name in names} | {"prompts": 4}]
    build_report(workspace, RUN, tmp_path / "out", facts={"planned": planned, "expected_samples": 4})
    text = (tmp_path / "out" / "report.md").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("| budgetdraft") and line.endswith("| 4 | 1 |")]
    assert "sampled" in line


def test_budgets_without_intervals_are_no_effect_and_no_certainty():
    def cell(budget: int, value: float) -> Cell:
        return Cell("budgetdraft", 1024, budget, 1, Estimate(value, None, None, 8))

    [found] = budget_effects([cell(64, 0.50), cell(128, 0.51)])
    assert found.status == "insufficient" and "without an interval" in found.sentence
    [found] = budget_effects([cell(64, 0.50), cell(128, 0.50)])
    assert found.status == "no effect"
