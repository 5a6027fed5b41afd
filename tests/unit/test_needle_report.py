"""What a report says of needles: acceptance by how far back they stand, and how many answers were found."""

import csv
from pathlib import Path
from typing import Any

import pytest

from bdcore.config import CorpusConfig
from bdcore.documents import Document
from bdcore.documents.needle import hidden
from reports.build import build_report
from tasks.reporting import answers
from tests.unit.test_reports import RUN, Page, sample, store

DISTANCES = (60, 300, 1020)
"""Of documents 0, 1 and 2, again and again: the newest, the second and the oldest quarter of 1024 tokens."""
ANSWERS = {f"doc-{doc}": str(100_000 + doc) for doc in range(12)}


def asked(doc: int, *, right: bool, **changes: Any) -> dict[str, Any]:
    text = f" {ANSWERS[f'doc-{doc}'] if right else 999_999}. And so on"
    place = {"corpus": "needle", "evidence_distance": DISTANCES[doc % 3], "output_text": text}
    return sample(doc=doc, **{**place, **changes})


def rows() -> list[dict[str, Any]]:
    """Acceptance is 30, 20 and 10 of 40 by distance, 5 less with budget 32; the oldest answers are never found."""
    found = []
    for doc in range(12):
        old = doc % 3 == 2
        found.append(asked(doc, right=not old, method="ar"))
        for budget, less in ((64, 0), (32, 5)):
            found.append(asked(doc, right=not old, budget=budget, accepted=(30, 20, 10)[doc % 3] - less))
    return [*found, *(sample(doc=20 + doc) for doc in range(4))]


def table(paths: dict[str, Path], **wanted: str) -> dict[str, dict[str, str]]:
    """The rows of one cell, by distance."""
    found = csv.DictReader(paths["tables/needles.csv"].open())
    return {
        row["distance_of_the_prompt"]: row
        for row in found
        if wanted.items() <= row.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    workspace = tmp_path_factory.mktemp("it's a [work] space")
    store(workspace, rows())
    return build_report(workspace, RUN, tmp_path_factory.mktemp("out"), facts={"answers": ANSWERS})


def test_acceptance_is_told_by_the_distance_of_the_needle(paths):
    for budget, values in (("64", (0.75, 0.5, 0.25, 0.5)), ("32", (0.625, 0.375, 0.125, 0.375))):
        found = table(paths, drafter="multi_view", budget=budget)
        assert list(found) == ["0 to 25", "25 to 50", "75 to 100", "any"]
        assert [float(row["acceptance"]) for row in found.values()] == pytest.approx(values)
        assert [row["acceptance_n"] for row in found.values()] == ["4", "4", "4", "12"]
        ends = [(row["nearest_tokens"], row["farthest_tokens"]) for row in found.values()]
        assert ends == [("60", "60"), ("300", "300"), ("1020", "1020"), ("60", "1020")]


def test_answers_found_are_those_in_the_text_that_follows(paths):
    for drafter in ("multi_view", "ar"):
        found = table(paths, drafter=drafter)
        assert [float(row["answers_found"]) for row in found.values()] == pytest.approx([1, 1, 0, 2 / 3])
    assert {row["acceptance"] for row in table(paths, drafter="ar").values()} == {""}


def test_the_page_shows_the_table_and_the_figure(paths):
    page = paths["report.html"].read_text()
    assert {"fig-needles", "needles"} <= set(Page(page).ids)
    assert "Needles: by how far back the evidence stands" in paths["report.md"].read_text()
    assert ANSWERS["doc-1"] not in paths["report.md"].read_text().split("How it was measured")[1]
    assert "0.75 at 12.5, 0.50 at 37.5, 0.25 at 87.5" in paths["figures/needles.svg"].read_text()


def test_without_the_answers_none_is_called_found(tmp_path):
    store(tmp_path, rows())
    paths = build_report(tmp_path, RUN, tmp_path / "out", facts={})
    found = table(paths, drafter="multi_view", budget="64")
    assert [float(row["acceptance"]) for row in found.values()] == pytest.approx((0.75, 0.5, 0.25, 0.5))
    assert {row["answers_found"] for row in found.values()} == {""}


def test_other_texts_have_no_needles(tmp_path):
    store(tmp_path, [sample(doc=doc) for doc in range(4)])
    paths = build_report(tmp_path, RUN, tmp_path / "out", facts={"answers": ANSWERS})
    assert "tables/needles.csv" not in paths and "figures/needles.svg" not in paths


def test_workloads_and_methods_of_one_drafter_are_apart(tmp_path):
    cells = [{}, {"method": "triforce"}, {"workload": "sampled", "temperature": 1.0}]
    store(tmp_path, [asked(doc, right=True, accepted=10 * i, **c) for i, c in enumerate(cells) for doc in range(4)])
    paths = build_report(tmp_path, RUN, tmp_path / "out", facts={})
    with paths["tables/needles.csv"].open() as file:
        found = [
            (r["drafter"], r["workload"], float(r["acceptance"]))
            for r in csv.DictReader(file)
            if r["distance_of_the_prompt"] == "any"
        ]
    assert sorted(found) == [
        ("multi_view, budgetdraft", "greedy", 0.0),
        ("multi_view, budgetdraft", "sampled", 0.5),
        ("multi_view, triforce", "greedy", 0.25),
    ]


def test_the_answers_of_a_study_are_those_of_its_documents():
    fillers = [Document(f"text-{i}", "folder", "A line.\n" * 400) for i in range(6)]
    asking = hidden(fillers, CorpusConfig(source="needle", split="test"))
    found = answers([*asking, *fillers])
    assert list(found) == [d.doc_id for d in asking]
    for document in asking:
        [evidence] = [n for n in document.needles if n.asked]
        assert found[document.doc_id] == evidence.answer
