"""Drafters of several studies side by side, on rows whose truth is known by hand."""

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bdcore.collapse import ratio_of_sums
from bdcore.collapse.pairing import difference, quotient
from bdcore.identity import write_manifest
from reports.across import write_envelope
from reports.curves import all_curves
from reports.envelope import COLUMNS, compare, compare_all, drafters, envelope, retention, upper_envelope
from reports.growth import growth
from reports.studies import documents
from tests.unit.test_reports import failure, sample, store

SETTINGS = {"new_tokens": 32, "chunk": 8}


def trained(study: str, **changes):
    return sample(run_key=f"{study:0<12}", drafter_key=f"key-{study}", drafter_name="trained", **changes)


def base(study: str, *, key: str = "key-base", **changes):
    named = {"method": "sd_sparse", "drafter_key": key, "drafter_name": "base"}
    return sample(**named | {"run_key": f"{study:0<12}"} | changes)


def ngram(study: str, **changes):
    return sample(method="ngram", budget=-1, run_key=f"{study:0<12}", **changes) | {
        "drafter_key": None,
        "drafter_name": None,
    }


def finish(workspace: Path, study: str, rows, *, named: bool = True, created: str = "", **settings):
    """Store a run of a study with the manifest its grid leaves."""
    folder = store(workspace, rows).parent
    facts = {"study": study} if named else {}
    manifest = write_manifest(folder, rows[0]["run_key"], config=SETTINGS | settings, inputs={"verifier": "v"}, **facts)
    if created:
        (folder / "manifest.json").write_text(json.dumps(manifest | {"created": created}))


def only(rows, **where):
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    assert len(found) == 1, found
    return found[0]


def rows_of(workspace: Path):
    return envelope(documents(workspace))


# --- names


def test_a_drafter_is_called_by_its_study_and_the_shared_base_appears_once(tmp_path):
    for study in ("two", "one"):
        rows = [base(study, doc=d, accepted=10) for d in range(3)] + [ngram(study, doc=d) for d in range(3)]
        rows += [trained(study, doc=d) for d in range(3)] + [sample(method="ar", run_key=rows[0]["run_key"])]
        finish(tmp_path, study, rows)
    found = rows_of(tmp_path)
    assert [(r["study"], r["drafter"], r["n"]) for r in found if r["budget"] > 0] == [
        ("one", "base", 3),
        ("one", "one", 3),
        ("two", "two", 3),
    ]
    assert only(found, budget=-1)["drafter"] == "ngram" and only(found, budget=-1)["n"] == 3
    assert drafters(found) == ["one", "two", "base", "ngram"]


def test_a_study_without_a_name_in_its_manifest_is_known_by_its_drafter_and_else_by_its_run(tmp_path):
    finish(tmp_path, "aaa", [trained("aaa")], named=False)
    finish(tmp_path, "bbb", [trained("bbb")], named=False)
    (tmp_path / "drafters" / "key-aaa").mkdir(parents=True)
    write_manifest(tmp_path / "drafters" / "key-aaa", "key-aaa", study="wide")
    assert {row["drafter"] for row in rows_of(tmp_path)} == {"wide", "bbb000000000"}


def test_an_unfinished_run_is_known_by_its_drafter(tmp_path):
    store(tmp_path, [trained("aaa")])
    (tmp_path / "drafters" / "key-aaa").mkdir(parents=True)
    write_manifest(tmp_path / "drafters" / "key-aaa", "key-aaa", study="wide")
    assert only(rows_of(tmp_path))["drafter"] == "wide"


def test_one_study_trained_twice_is_two_drafters(tmp_path):
    finish(tmp_path, "wide", [trained("aaa", accepted=10)])
    finish(tmp_path, "wide", [trained("bbb", accepted=30)])
    found = {row["drafter"]: row["acceptance"] for row in rows_of(tmp_path)}
    assert found == {"wide@aaa000": 0.25, "wide@bbb000": 0.75}


def test_other_seeds_are_other_rows_of_the_same_name(tmp_path):
    finish(tmp_path, "wide", [trained("aaa", accepted=10, seed=1)])
    finish(tmp_path, "wide", [trained("bbb", accepted=30, seed=2)])
    assert [(r["drafter"], r["seed"], r["acceptance"]) for r in rows_of(tmp_path)] == [
        ("wide", 1, 0.25),
        ("wide", 2, 0.75),
    ]


def test_a_base_measured_in_another_way_is_not_added_up(tmp_path):
    finish(tmp_path, "one", [base("one", accepted=10)])
    finish(tmp_path, "two", [base("two", accepted=30)], chunk=16)
    assert {r["drafter"]: r["acceptance"] for r in rows_of(tmp_path)} == {"base@one000": 0.25, "base@two000": 0.75}


def test_axes_of_the_grid_are_no_other_way_to_measure(tmp_path):
    finish(tmp_path, "one", [base("one")], contexts=[1], budgets=[8])
    finish(tmp_path, "two", [base("two")], contexts=[1, 2], budgets=[8, 16], prompts=9)
    assert only(rows_of(tmp_path))["drafter"] == "base"


def test_a_finished_run_keeps_the_plain_name_beside_an_unfinished_one(tmp_path):
    finish(tmp_path, "one", [base("one", accepted=10)])
    store(tmp_path, [base("two", accepted=30)])
    assert {r["drafter"]: r["acceptance"] for r in rows_of(tmp_path)} == {"base": 0.25, "base@two000": 0.75}


def test_of_a_document_measured_twice_the_newest_run_counts(tmp_path):
    finish(tmp_path, "one", [base("one", doc=0, accepted=40), base("one", doc=1, accepted=4)], created="2030-01-01")
    finish(tmp_path, "two", [base("two", doc=0, accepted=0), base("two", doc=2, accepted=8)], created="2029-01-01")
    row = only(rows_of(tmp_path))
    assert row["n"] == 3 and row["acceptance"] == (40 + 4 + 8) / 120


def test_other_draft_lengths_and_refreshes_are_part_of_the_name(tmp_path):
    finish(tmp_path, "one", [trained("one"), trained("one", gamma_mode="adaptive"), trained("one", refresh=4)])
    assert drafters(rows_of(tmp_path)) == ["one", "one adaptive", "one refresh 4"]


def test_a_workspace_without_results_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results"):
        documents(tmp_path)


# --- envelope


def test_rows_have_exactly_the_columns_and_the_known_values(tmp_path):
    rows = [
        trained("one", doc=0, drafted=40, accepted=20, decode_s=1.0),
        trained("one", doc=1, drafted=20, accepted=16, decode_s=0.5),
        trained("one", doc=2, drafted=40, accepted=38, decode_s=0.5, degenerate=True),
        trained("one", doc=3, drafted=0, accepted=0, decode_s=2.0),
        failure(doc=4, run_key=f"{'one':0<12}", drafter_key="key-one", drafter_name="trained"),
    ]
    finish(tmp_path, "one", rows)
    (row,) = rows_of(tmp_path)
    assert tuple(row) == COLUMNS
    interval = ratio_of_sums([20, 16, 38], [40, 20, 40])
    assert (row["acceptance"], row["lo"], row["hi"], row["n"]) == (0.74, interval.low, interval.high, 3)
    assert row["lo"] < 0.74 < row["hi"]
    assert row["speedup_decode"] == 8 / 4  # every prompt took `ar` 2 s
    assert row["degenerate_share"] == 0.25 and row["acceptance_nondegenerate"] == 36 / 60
    assert row["far_acceptance"] is None
    assert (row["study"], row["seed"], row["policy"], row["context"]) == ("one", 1, "attention_mass", 1024)


def test_a_replay_is_untimed_and_sound_and_tells_far_tokens(tmp_path):
    replay = {"workload": "replay", "degenerate": None, "decode_s": None, "ar_decode_s": None}
    far = [{"far_rounds": 5, "far_accepted": 1}, {"far_rounds": 3, "far_accepted": 3}]
    finish(tmp_path, "one", [trained("one", doc=d, accepted=10 * d, **replay, **far[d]) for d in range(2)])
    row = only(rows_of(tmp_path))
    assert row["far_acceptance"] == 0.5 and row["acceptance_nondegenerate"] == row["acceptance"] == 0.125
    assert row["degenerate_share"] is None and row["speedup_decode"] is None


# --- upper envelope


def cell(drafter, acceptance, lo, hi, n=8, **changes):
    same = {"workload": "replay", "corpus": "pg19", "context": 1024, "budget": 64, "policy": "random"}
    told = {"acceptance": acceptance, "lo": lo, "hi": hi, "n": n}
    return {"drafter": drafter, "seed": 0, **same, "position_mode": "absolute", "gamma": 4, **told, **changes}


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        ((0.50, 0.45, 0.55), "within"),  # meets full's [0.54, 0.66]
        ((0.50, 0.45, 0.53), "below"),
        ((0.70, 0.67, 0.75), "above"),
        ((0.60, None, None), "within"),  # as high as the reference
        ((0.53, None, None), "insufficient"),  # documents that all agree are no certainty
        ((0.60, 0.50, 0.70, 3), "insufficient"),
        ((None, None, None), "insufficient"),
    ],
)
def test_the_verdict_is_against_the_better_reference(mine, verdict):
    rows = [cell("window", 0.40, 0.35, 0.45), cell("full", 0.60, 0.54, 0.66), cell("multi", *mine)]
    (row,) = upper_envelope(rows, "multi", ["window", "full"])
    assert row["verdict"] == verdict and row["reference"] == "full" and row["reference_acceptance"] == 0.60
    assert only(upper_envelope(rows, "multi", ["window"]))["reference"] == "window"


def test_the_better_reference_may_change_from_cell_to_cell():
    rows = [
        *(cell("full", 0.6, 0.5, 0.7, context=1024), cell("full", 0.1, 0.05, 0.15, context=8192)),
        *(cell("window", 0.3, 0.2, 0.4, context=1024), cell("window", 0.3, 0.25, 0.35, context=8192)),
        *(cell("multi", 0.6, 0.5, 0.7, context=1024), cell("multi", 0.2, 0.15, 0.24, context=8192)),
        cell("multi", 0.5, 0.4, 0.6, context=1024, seed=1),
    ]
    found = upper_envelope(rows, "multi", ["full", "window"])
    assert [(r["context"], r["seed"], r["reference"], r["verdict"]) for r in found] == [
        (1024, 0, "full", "within"),
        (1024, 1, None, "no reference"),
        (8192, 0, "window", "below"),
    ]


def test_a_reference_with_few_documents_judges_nothing_and_an_unknown_one_is_named():
    rows = [cell("full", 0.6, 0.5, 0.7, n=3), cell("multi", 0.9, 0.8, 1.0)]
    assert only(upper_envelope(rows, "multi", ["full"]))["verdict"] == "insufficient"
    with pytest.raises(ValueError, match="drafter = fall: no rows of it; found full, multi"):
        upper_envelope(rows, "multi", ["fall"])


# --- retention and comparison


def doc(drafter, name, accepted, drafted=100, **changes):
    where = {k: v for k, v in cell(drafter, 0, 0, 0).items() if k not in ("acceptance", "lo", "hi", "n")}
    return where | {"doc_id": name, "accepted": accepted, "drafted": drafted} | changes


def test_retention_is_over_the_documents_at_every_context():
    short = [doc("a", f"d{i}", n, context=512) for i, n in enumerate([80, 40, 60])]
    long = [doc("a", f"d{i}", n, context=2048) for i, n in enumerate([40, 20])]
    first, second = retention([*long, *short])  # d2 is missing at 2048
    assert (first["context"], first["retention"], first["lo"], first["hi"], first["n"]) == (512, 1.0, 1.0, 1.0, 2)
    assert (second["context"], second["shortest"], second["n"]) == (2048, 512, 2)
    assert (second["acceptance"], second["retention"]) == (0.3, 0.5)
    # Both documents retain a half, however unlike they are: nothing varies, which is no certainty.
    assert second["lo"] is None and second["hi"] is None


def test_retention_keeps_drafters_and_budgets_apart_and_needs_two_contexts():
    table = [doc("a", "d", 50, context=c, budget=b) for c in (512, 1024) for b in (64, 128)]
    table += [doc("b", "d", n, context=c) for c, n in ((512, 50), (1024, 10))] + [doc("c", "d", 50)]
    found = retention(table)
    assert len(found) == 6 and not [row for row in found if row["drafter"] == "c"]
    assert only(found, drafter="b", context=1024)["retention"] == pytest.approx(0.2)


def test_retention_from_nothing_is_undefined_and_disjoint_documents_give_none():
    (_, nothing) = retention([doc("a", "d", 0, context=512), doc("a", "d", 10, context=1024)])
    assert nothing["retention"] is None and nothing["lo"] is None
    for row in retention([doc("a", "d", 5, context=512), doc("a", "e", 10, context=1024)]):
        assert row["n"] == 0 and row["retention"] is None and row["acceptance"] is None


def test_a_comparison_pairs_documents():
    # Documents differ by 80 points, the drafters by 4 to 6 on each: only pairing can see it.
    easy = [10, 30, 50, 70, 90]
    table = [doc("a", f"d{i}", n + gap) for i, (n, gap) in enumerate(zip(easy, (4, 6, 5, 4, 6), strict=True))]
    table += [doc("b", f"d{i}", n) for i, n in enumerate(easy)]
    table += [doc("a", "alone", 100), doc("b", "lonely", 0), doc("a", "idle", 0, drafted=0), doc("b", "idle", 9)]
    row = only(compare(table, "a", "b"))
    assert (row["acceptance"], row["other_acceptance"], row["n"]) == (0.55, 0.5, 5)
    assert row["difference"] == pytest.approx(0.05)
    assert 0.039 < row["lo"] < 0.05 < row["hi"] < 0.061
    back = only(compare(table, "b", "a"))
    assert back["difference"] == pytest.approx(-0.05) and back["lo"] < -0.04 and back["hi"] < 0


def test_a_comparison_never_crosses_cells_or_seeds():
    table = [doc("a", "d", 50), doc("b", "d", 40, budget=128), doc("b", "d", 40, seed=1)]
    assert compare(table, "a", "b") == []
    with pytest.raises(ValueError, match="drafter = x"):
        compare(table, "a", "x")


def test_all_pairs_or_those_against_named_drafters():
    table = [doc(name, "d", 50) for name in ("ngram", "b", "base", "a")]
    pairs = [(r["drafter"], r["other"]) for r in compare_all(table)]
    assert sorted(pairs) == [
        ("a", "b"),
        ("a", "base"),
        ("a", "ngram"),
        ("b", "base"),
        ("b", "ngram"),
        ("base", "ngram"),
    ]
    assert [(r["drafter"], r["other"]) for r in compare_all(table, ["base"])] == [
        ("a", "base"),
        ("b", "base"),
        ("ngram", "base"),
    ]
    with pytest.raises(ValueError, match="drafter = c"):
        compare_all(table, ["c"])


@pytest.mark.parametrize(("statistic", "combine"), [(difference, np.subtract), (quotient, np.divide)])
def test_paired_intervals_are_those_of_resampled_documents(statistic, combine):
    rng = np.random.default_rng(4)
    top, bottom = rng.integers(20, 60, (2, 40)).astype(float), rng.integers(60, 100, (2, 40)).astype(float)
    found = statistic(*(list(zip(t, b, strict=True)) for t, b in zip(top, bottom, strict=True)))
    picks = rng.integers(0, 40, (20000, 40))
    ratios = top[:, picks].sum(-1) / bottom[:, picks].sum(-1)
    low, high = np.percentile(combine(*ratios), [2.5, 97.5])
    assert found.value == pytest.approx(combine(*(top.sum(1) / bottom.sum(1))))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))
    assert found.n == 40 and found.kind == "BCa"


def test_paired_statistics_leave_out_what_is_undefined():
    first = [(1.0, 2.0), (None, 2.0), (1.0, 0.0), (3.0, 4.0)]
    second = [(1.0, 4.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0)]
    assert difference(first, second).n == 2
    assert difference(first, second).value == pytest.approx(4 / 6 - 2 / 6)
    assert difference(first[:1], second[:1]).low is None
    assert quotient([(1.0, 2.0)], [(0.0, 2.0)]).value is None
    assert difference([], []).value is None


# --- files


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Three studies on two corpora, two policies, two budgets and the full cache."""
    workspace = tmp_path_factory.mktemp("workspace")
    for i, study in enumerate(("multi", "full-only", "window")):
        rows = []
        for corpus in ("pg19", "stdlib"):
            for context in (1024, 4096):
                for d in range(4):
                    place = {"corpus": corpus, "context": context, "doc": d}
                    for budget, policy in ((64, "attention_mass"), (256, "sink_recent"), (-1, "full")):
                        n = 30 - 3 * i + d - context // 1024
                        rows.append(trained(study, budget=budget, policy=policy, accepted=n, **place))
                    rows.append(base(study, accepted=12 + d, **place))
        finish(workspace, study, rows)
    out = workspace / "out"
    judged = ("multi", ["full-only", "base"])
    return out, write_envelope(workspace, out, against=["base"], judged=judged)


def table(path: Path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_tables_are_written_with_empty_cells_for_null(written):
    out, paths = written
    assert {p.name for p in paths if p.suffix == ".csv"} == {
        *("envelope.csv", "compare.csv", "retention.csv", "growth.csv", "upper_envelope.csv")
    }
    assert all(path.is_file() and path.parent == out for path in paths)
    rows = table(out / "envelope.csv")
    assert tuple(rows[0]) == COLUMNS and {row["far_acceptance"] for row in rows} == {""}
    row = only(rows, drafter="multi", corpus="pg19", context="1024", budget="64")
    assert float(row["acceptance"]) == (29 + 30 + 31 + 32) / 160 and row["n"] == "4"
    assert {row["other"] for row in table(out / "compare.csv")} == {"base"}
    assert {row["verdict"] for row in table(out / "upper_envelope.csv")} <= {"above", "within", "below"}
    kept = only(table(out / "retention.csv"), drafter="multi", corpus="pg19", context="4096", budget="64")
    assert float(kept["retention"]) == pytest.approx(110 / 122) and float(kept["hi"]) < 1


def test_figures_name_drafters_axes_and_values_and_are_well_formed(written):
    out, _ = written
    figures = {path.stem: path.read_text() for path in out.glob("*.svg")}
    assert set(figures) == {
        *("acceptance-context-greedy-pg19-gamma4", "acceptance-context-greedy-stdlib-gamma4"),
        "acceptance-budget-greedy-gamma4",
    }
    for text in figures.values():
        ElementTree.fromstring(text)
        assert "acceptance (% of drafted)" in text and all(f">{name}<" in text for name in ("multi", "window", "base"))
        assert "full cache" in text or ">full<" in text
    over_context = figures["acceptance-context-greedy-pg19-gamma4"]
    assert "context (tokens)" in over_context and "budget 64, attention_mass, absolute, multi: 76.2 %" in over_context
    over_budget = figures["acceptance-budget-greedy-gamma4"]
    assert "budget (keys per layer and head)" in over_budget and "pg19, 4096 tokens" in over_budget
    assert "at 1024 tokens" not in over_budget  # the longest context alone


def test_lines_of_a_figure_differ_by_more_than_colour():
    from reports.curves import _looks

    looks = _looks([cell(f"drafter-{i:02d}", 0.5, 0.4, 0.6) for i in range(16)])
    assert len({(look["color"], look["linestyle"]) for look in looks.values()}) == 16
    first = list(looks.values())[:8]
    assert len({look["marker"] for look in first}) == len({look["color"] for look in first}) == 8


def test_seeds_are_told_apart_in_figures_and_nothing_measured_draws_nothing():
    rows = [cell("a", 0.5, 0.4, 0.6, seed=s, context=c) for s in (0, 1) for c in (512, 1024)]
    text = all_curves(rows)[0].standalone
    assert ">a, seed 0<" in text and ">a, seed 1<" in text
    assert all_curves([cell("a", None, None, None)]) == []


def test_one_context_without_intervals_is_drawn_too():
    assert len(all_curves([cell("a", 0.5, None, None), cell("a", 0.6, None, None, budget=-1, policy="full")])) == 2


def test_the_same_rows_give_the_same_files(written, tmp_path):
    out, paths = written
    again = write_envelope(out.parent, tmp_path / "out", against=["base"], judged=("multi", ["full-only", "base"]))
    assert [p.read_bytes() for p in again] == [p.read_bytes() for p in paths]


def test_a_place_that_cannot_be_written_is_a_value_error(tmp_path):
    (tmp_path / "file").write_text("")
    finish(tmp_path, "one", [trained("one")])
    with pytest.raises(ValueError, match="cannot be written"):
        write_envelope(tmp_path, tmp_path / "file" / "out")


# --- growth


def test_growth_counts_the_tokens_learned_from_until_each_validation(tmp_path):
    folder = tmp_path / "drafters" / "abc"
    folder.mkdir(parents=True)
    steps = [{"step": i, "tokens": 10 * i} for i in (1, 2, 3)]
    steps[1]["agreement"] = {"full": 0.5, "budget_64": 0.25}
    steps[2] |= {"agreement": {"full": 0.6}, "decoded": {"full": 0.4}}
    (folder / "training_log.json").write_text(json.dumps(steps))
    assert growth(tmp_path) == []  # not finished
    write_manifest(folder, "abc", study="s", stage="trained", training={"seed": 2})
    facts = {"study": "s", "stage": "trained", "seed": 2, "drafter_key": "abc"}
    assert growth(tmp_path) == [
        {**facts, "step": step, "tokens": tokens, "measure": measure, "view": view, "share": share}
        for step, tokens, measure, view, share in (
            (2, 30, "agreement", "full", 0.5),
            (2, 30, "agreement", "budget_64", 0.25),
            (3, 60, "agreement", "full", 0.6),
            (3, 60, "decoded", "full", 0.4),
        )
    ]
