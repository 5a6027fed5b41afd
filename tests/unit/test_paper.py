"""The paper beside a run: its setting, its numbers and their contradictions, its tables and score from our rows."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from markupsafe import escape

from bdcore.config import load_config
from bdcore.evaluation.grid import cells, unused_exclusions
from bdcore.kv.budget import FULL
from reports.build import build_report
from reports.paper import CONTRADICTIONS, contradictions, peaks
from reports.printed import find, numbers
from reports.tables import query
from tests.unit.test_reports import RUN, Page, failure, grid, one, replayed, sample, store

CONFIG = Path(__file__).parents[2] / "configs" / "paper.yaml"
DRAFT_LENGTHS = {3800: range(5, 85, 5), 8192: range(5, 35, 5), 16384: range(5, 45, 5)}
"""By context: the authors' grid, and at 4K what Figure 3 shows beyond it."""


# --- the setting


def test_the_configuration_is_the_papers_setting():
    config = load_config(CONFIG)
    training = config.training
    assert (config.verifier.source, config.drafter.source) == (
        "NousResearch/Yarn-Llama-2-7b-128k",
        "JackFram/llama-68m",
    )
    assert (config.runtime.dtype, config.runtime.training_dtype, config.seed) == ("float16", "float32", 42)
    assert training.prefix_lengths == {16128: 1} and training.continuation == 256
    assert config.targets.length == 16384 and config.targets.generated == 0
    assert config.targets.forced - training.validation.sequences == training.steps == 5000
    assert training.views.budgets == {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    assert (training.lam, training.learning_rate, training.weight_decay) == (0.5, 1e-5, 0.01)
    assert (training.clip, training.warmup, training.batch_size) == (1.0, 150, 1)
    assert (training.views.chunk, training.views.sinks, config.grid.chunk, config.grid.sinks) == (8, 8, 8, 8)
    assert (config.grid.prompts, config.grid.new_tokens, config.grid.contexts) == (9, 256, [3800, 8192, 16384])


def test_the_grid_has_every_printed_cell_that_our_methods_can_measure():
    config = load_config(CONFIG)
    have = {(c.method, c.context, c.budget, c.gamma) for c in cells(config.grid)}
    corpora = {corpus.source for corpus in config.grid.corpus}
    for n in numbers():
        if n.dataset and n.method in config.grid.methods and n.method != "ar":
            assert n.dataset in corpora
            gammas = [n.gamma] if n.gamma else DRAFT_LENGTHS[n.context]
            budgets = [n.budget] if n.budget else config.grid.budgets
            assert {(n.method, n.context, b, g) for b in budgets for g in gammas} <= have, n


def test_each_context_has_the_papers_draft_lengths_and_a_lookup_in_every_cell():
    grid = load_config(CONFIG).grid
    for method, budgets in (("sd_sparse", grid.budgets), ("budgetdraft", grid.budgets), ("ngram", [FULL])):
        found = {(c.context, c.gamma, c.budget) for c in cells(grid) if c.method == method}
        assert found == {(c, g, b) for c, gammas in DRAFT_LENGTHS.items() for g in gammas for b in budgets}
    assert unused_exclusions(grid) == []


def test_questions_are_put_in_the_words_of_the_papers_authors():
    corpora = {corpus.source: corpus.frame for corpus in load_config(CONFIG).grid.corpus}
    assert corpora == {"pg19": "benchmark", "longbench": "paper", "lwm": "paper"}  # a book of PG-19 has no question


# --- the printed numbers


def test_contradictions_are_found_by_arithmetic_and_marked_in_the_table():
    found = contradictions(numbers())
    assert {c.name for c in found} == set(CONTRADICTIONS)
    for n in numbers():
        names = {c.name for c in found if n in c.numbers}
        assert set((n.contradicts or "").split()) == names, n


def test_the_8k_headline_is_divided_by_the_16k_row():
    eight = [peak for peak in peaks(numbers()) if peak.context == 8192]
    assert len(eight) == 3 and all(peak.foreign and peak.other_context == 16384 for peak in eight)
    assert [round(peak.corrected, 1) for peak in eight] == [2.7, 1.4, 2.9]
    (told,) = [c.sentence for c in contradictions(numbers()) if "abstract" in c.sentence]
    assert "29.51 / 19.43 = 1.519" in told and "The abstract's 4.46x becomes 2.94x." in told


def test_nothing_is_found_where_the_numbers_agree():
    """Table 1 set to Figure 3 and Table 3 to Table 1, and the note to its own cells."""
    printed = []
    for n in numbers():
        place = {"dataset": n.dataset, "context": n.context}
        if n.exhibit in ("table_1", "table_3") and n.metric == "speedup":
            (peak,) = find(numbers(), exhibit="figure_3", metric="speedup", **place)
            n = replace(n, value=peak.value)
        elif n.exhibit == "table_3":
            n = replace(n, value=0.5)
        elif n.metric in ("interior_peaks", "monotone"):
            n = replace(n, value=6 if n.metric == "interior_peaks" else 3)
        printed.append(n)
    assert contradictions(printed) == []


@pytest.mark.parametrize("factor", [0.9, 1.3])
def test_a_difference_that_no_row_explains_is_not_explained(factor):
    printed = [
        replace(n, value=n.value * factor) if (n.exhibit, n.dataset, n.context) == ("figure_3", "pg19", 3800) else n
        for n in numbers()
    ]
    (found,) = [c for c in contradictions(printed) if c.sentence.startswith("pg19, 3800")]
    assert found.name == "peak" and "No ratio of two rows" in found.sentence


def test_the_implied_agreement_gives_back_the_acceptance():
    for peak in peaks(numbers()):
        accepted = sum(peak.agreement**i for i in range(1, peak.gamma + 1))
        assert accepted == pytest.approx(peak.acceptance * peak.gamma)
    (loop,) = [p for p in peaks(numbers()) if (p.dataset, p.context) == ("lwm", 3800)]
    assert (loop.gamma, round(loop.accepted, 1), round(loop.rounds, 1)) == (65, 51.6, 4.9)
    assert loop.agreement == pytest.approx(0.993, abs=5e-4)


def test_the_printed_numbers_are_a_view(tmp_path):
    store(tmp_path, [sample()])
    sql = "SELECT value FROM paper_numbers WHERE exhibit = 'table_3' AND dataset = 'lwm' AND context = 16384"
    assert query(tmp_path, f"{sql} AND metric = 'acceptance' ORDER BY budget")[1] == [
        (0.6648,),
        (0.6215,),
        (0.558,),
        (0.3392,),
    ]
    assert one(tmp_path, "SELECT count(*) AS n, count(contradicts) AS marked FROM paper_numbers") == {
        "n": len(numbers()),
        "marked": sum(n.contradicts is not None for n in numbers()),
    }


# --- the paper's tables from our rows


def test_the_authors_score_beside_ours(tmp_path):
    """One answer ends early, and `ar` finished a prompt more: tokens per second over all of it, prefill included."""
    store(tmp_path, [
        sample(method="ar", doc=0, wall_s=3.0, new_tokens=32),
        sample(method="ar", doc=1, wall_s=5.0, new_tokens=32),
        sample(doc=0, drafted=40, accepted=30, new_tokens=32, wall_s=1.0, ar_wall_s=3.0),
        failure(doc=1),
    ])  # fmt: skip
    score = one(tmp_path, "SELECT * FROM authors_scores WHERE method = 'budgetdraft'")
    assert score["acceptance"] == 0.75
    assert score["authors_tokens_per_s"] == 32.0 and score["authors_ar_tokens_per_s"] == 8.0
    assert score["authors_speedup"] == 4.0 and score["end_to_end_speedup"] == 3.0
    alone = one(tmp_path, "SELECT * FROM authors_scores WHERE method = 'ar'")
    assert alone["authors_speedup"] == 1.0 and alone["acceptance"] is None


def test_the_authors_count_gamma_drafts_a_round(tmp_path):
    """Where ours drafted fewer, since a lookup found nothing or the length adapted; but not past the length limit."""
    short = {"gamma": 65, "budget": -1, "rounds": 4, "drafted": 251, "accepted": 251}  # 65, 65, 65 and the last 56
    store(tmp_path, [
        sample(method="ar"),
        sample(method="sd_full", **short),
        sample(method="ngram", drafter_name=None, drafter_key=None, budget=-1, rounds=20, drafted=20, accepted=10),
        sample(gamma_mode="adaptive", rounds=20, drafted=40, accepted=20),
        sample(method="streaming", rounds=0, drafted=0, accepted=0),
    ])  # fmt: skip
    sql = "SELECT method, acceptance, authors_acceptance FROM authors_scores ORDER BY method"
    assert query(tmp_path, sql)[1] == [
        ("ar", None, None),
        ("budgetdraft", 0.5, 20 / 80),
        ("ngram", 0.5, 10 / 80),
        ("sd_full", 1.0, 1.0),
        ("streaming", None, None),
    ]


def test_the_papers_acceptance_is_compared_by_its_own_count(tmp_path):
    place = {"context": 3800, "corpus": "pg19", "budget": 256, "gamma": 5, "gamma_mode": "adaptive"}
    store(tmp_path, [
        sample(method="ar", context=3800, corpus="pg19"),
        sample(rounds=20, drafted=40, accepted=30, **place),
    ])  # fmt: skip
    measured = "SELECT DISTINCT measured FROM paper_comparison WHERE metric = 'acceptance'"
    assert query(tmp_path, measured)[1] == [(30 / 100,)]
    for table in ("paper_table_1", "paper_table_2", "paper_table_3", "paper_figure_3"):
        sql = f"SELECT acceptance, authors_acceptance FROM {table} WHERE policy <> 'full'"
        assert query(tmp_path, sql)[1] == [(0.75, 0.3)], table


def test_scores_are_null_without_ar_without_time_and_without_drafts(tmp_path):
    store(tmp_path, [
        sample(method="ar", wall_s=0.0, ar_wall_s=0.0),
        sample(drafted=0, accepted=0, wall_s=0.0, ar_wall_s=0.0),
        sample(context=2048),
        replayed(context=4096),
    ])  # fmt: skip
    _, found = query(
        tmp_path, "SELECT context, acceptance, authors_speedup FROM authors_scores WHERE gamma > 0 ORDER BY context"
    )
    assert found == [(1024, None, None), (2048, 0.5, None), (4096, 0.5, None)]


def swept() -> list[dict]:
    """Two budgets x three draft lengths: gamma 8 is best for either, but gamma 16 was measured at one budget alone."""
    rows = []
    for doc in range(3):
        rows.append(sample(method="ar", doc=doc))
        for budget, gamma, seconds in ((64, 4, 1.0), (128, 4, 1.0), (64, 8, 0.5), (128, 8, 0.25), (64, 16, 0.1)):
            rows.append(sample(doc=doc, budget=budget, gamma=gamma, decode_s=seconds))
        rows.append(sample(doc=doc, budget=-1, gamma=4, decode_s=0.01))
    return rows


def test_figure_3_is_a_mean_over_sparse_budgets_with_its_peak(tmp_path):
    store(tmp_path, swept())
    _, found = query(tmp_path, "SELECT gamma, budgets, end_to_end_speedup, peak FROM paper_figure_3 ORDER BY gamma")
    assert [(g, b, p) for g, b, _, p in found] == [(4, 2, False), (8, 2, True), (16, 1, False)]
    assert [s for _, _, s, _ in found] == pytest.approx([1.5, (2.0 + 2.4) / 2, 3 / 1.1])


def test_table_1_takes_the_best_end_to_end_speedup(tmp_path):
    """As the paper: gamma 8 decodes faster, gamma 4 is faster with its prefill."""
    store(tmp_path, [
        sample(method="ar"),
        sample(gamma=4, decode_s=1.0, wall_s=1.5),
        sample(gamma=8, decode_s=0.5, wall_s=2.5),
    ])  # fmt: skip
    assert one(tmp_path, "SELECT best_gamma, end_to_end_speedup FROM paper_table_1") == {
        "best_gamma": 4,
        "end_to_end_speedup": 2.0,
    }


def paper_rows() -> list[dict]:
    """Two budgets of the paper's at its shortest context, by its gamma and another one."""
    rows = []
    for doc in range(4):
        place = {"doc": doc, "context": 3800, "corpus": "pg19"}
        rows.append(sample(method="ar", **place))
        for budget in (256, 512):
            for gamma, seconds in ((5, 1.0), (10, 0.5)):
                rows.append(sample(budget=budget, gamma=gamma, drafted=100, accepted=90, decode_s=seconds, **place))
    return rows


def test_a_run_is_compared_where_it_measured_a_cell_of_the_papers(tmp_path):
    store(tmp_path, paper_rows())
    sql = """SELECT exhibit, budget, paper_gamma, gamma, metric, paper, measured FROM paper_comparison
      WHERE coalesce(budget, 256) = 256 ORDER BY exhibit, metric"""
    _, found = query(tmp_path, sql)
    assert found == [
        ("figure_3", None, 50, 10, "speedup", 5.29, 2.0),
        ("table_1", 256, None, 10, "acceptance", 0.6798, 0.9),
        ("table_1", 256, None, 10, "speedup", 5.31, 2.0),
        ("table_3", 256, 5, 5, "acceptance", 0.9162, 0.9),
        ("table_3", 256, 5, 5, "speedup", 2.95, 1.5),
    ]


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_the_report_shows_the_paper_beside_such_a_run(tmp_path, name):
    store(tmp_path, paper_rows())
    text = " ".join(build_report(tmp_path, RUN, tmp_path / "out", facts={})[name].read_text().split())
    assert "29.51 / 19.43 = 1.519" in text and "unexplained" in text
    for c in contradictions(numbers()):
        assert str(escape(c.sentence)) in text
    assert "Printed numbers and this run" in text
    if name.endswith("html"):
        page = Page(text)
        assert {"paper", "t-paper", "t-compared"} <= set(page.ids)


def test_a_run_of_other_cells_has_one_line_unless_more_is_asked_for(tmp_path):
    store(tmp_path, grid(4))
    plain = build_report(tmp_path, RUN, tmp_path / "a", facts={})
    assert "tables/paper_comparison.csv" not in plain
    for name in ("report.html", "report.md"):
        text = plain[name].read_text()
        assert "This run measured no cell" in text and f"{len(contradictions(numbers()))} contradictions" in text
        assert "29.51 / 19.43" not in text
    asked = build_report(tmp_path, RUN, tmp_path / "b", facts={"paper": True})["report.md"].read_text()
    assert "29.51 / 19.43" in asked and "Printed numbers and this run" not in asked
    assert "This run measured no cell" not in asked


def test_numbers_of_the_report_come_from_the_table(tmp_path, monkeypatch):
    """A changed number changes the arithmetic that is shown."""
    changed = tuple(
        replace(n, value=31.0) if (n.metric, n.dataset, n.context) == ("tokens_per_s", "lwm", 8192) else n
        for n in numbers()
    )
    monkeypatch.setattr("reports.comparison.numbers", lambda: changed)
    store(tmp_path, paper_rows())
    text = build_report(tmp_path, RUN, tmp_path / "out", facts={})["report.md"].read_text()
    assert "lwm, 8192 tokens: Table 1's" in text.replace("&#39;", "'")
    assert (
        "29.51" not in text
        and "| lwm | 8192 | 4.45 | 2.90 | 1.535 | 31.00 | 16384: 19.43 | 1.595 | unexplained |" in text
    )


def test_the_tables_are_written_beside_the_report(tmp_path):
    store(tmp_path, paper_rows())
    paths = build_report(tmp_path, RUN, tmp_path / "out", facts={})
    for view in ("authors_scores", "paper_table_1", "paper_figure_3", "paper_comparison"):
        with paths[f"tables/{view}.csv"].open() as file:
            rows = list(csv.DictReader(file))
        assert rows and not any(math.isnan(float(row["acceptance"] or 0)) for row in rows if "acceptance" in row)
