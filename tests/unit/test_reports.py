"""Views, figures and report on synthetic rows whose figures are known."""

import csv
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bdcore.schema import ROUNDS, SAMPLES, TARGETS, write_rows
from reports.build import build_report
from reports.measured import summary_rows
from reports.outputs import TEXT_LIMIT, in_pieces
from reports.tables import query, read, render_views, write_views

RUN = "0123456789ab"
VIEWS = {
    *("samples", "cells", "speedups", "frontier", "authors_scores"),
    *("paper_table_1", "paper_table_2", "paper_table_3", "paper_figure_3", "paper_numbers", "paper_comparison"),
}

FACTS = {
    "study": "synthetic",
    "expected_samples": 120,
    "hardware": {"cpu": "2 cores", "gpu": None},
    "config": {"grid": {"budgets": [64, 128], "policy": "attention_mass"}},
    "versions": {"torch": "0.0"},
    "seed": 42,
    "training": {
        "base": [{"step": s, "loss_a": 4 - s / 100, "loss_c": None, "budget": None} for s in range(100)],
        "multi_view": [{"step": s, "loss_a": 3 - s / 100, "loss_c": 3.3 - s / 100, "budget": 256} for s in range(100)],
    },
}


def sample(
    *,
    method: str = "budgetdraft",
    doc: int = 0,
    context: int = 1024,
    budget: int = 64,
    gamma: int = 4,
    drafted: int | None = 40,
    accepted: int | None = 20,
    decode_s: float | None = 1.0,
    **changes: Any,
) -> dict[str, Any]:
    """One SAMPLES row; `ar` took 2 s of decoding and 3 s in all."""
    ar = method == "ar"
    budget, gamma, drafted, accepted = (-1, 0, 0, 0) if ar else (budget, gamma, drafted, accepted)
    decode_s = 2.0 if ar else decode_s
    row = dict.fromkeys(SAMPLES.names) | {
        "run_key": RUN,
        "cell_key": f"{method}-{context}-{budget}-{gamma}",
        "method": method,
        "drafter_key": None if ar else "d0",
        "drafter_name": None if ar else "multi_view",
        "workload": "greedy",
        "corpus": "stdlib",
        "doc_id": f"doc-{doc}",
        "context": context,
        "budget": budget,
        "policy": "full" if budget < 0 else "attention_mass",
        "position_mode": "absolute",
        "gamma": gamma,
        "gamma_mode": "fixed",
        "refresh": 0,
        "temperature": 0.0,
        "seed": 1,
        "prompt_len": context,
        "new_tokens": 32,
        "finish_reason": "length",
        "rounds": 32 if ar else (drafted or 0) // gamma,
        "drafted": drafted,
        "accepted": accepted,
        "prefill_s": 1.0,
        "draft_prefill_s": 0.0 if ar else 0.2,
        "draft_s": 0.0 if ar else 0.3,
        "select_s": 0.0 if ar else 0.1,
        "verify_s": 1.9 if ar else 0.5,
        "overhead_s": 0.1,
        "ttft_s": 1.0,
        "decode_s": decode_s,
        "wall_s": None if decode_s is None else decode_s + 1.0,
        "ar_wall_s": 3.0,
        "ar_decode_s": 2.0,
        "drafter_kv_bytes_peak": 0 if ar else 2**20,
        "verifier_kv_bytes_peak": 2**24,
        "drafter_cached_peak": 0 if ar else abs(budget),
        "output_text": f"text of {doc}",
        "distinct_1": 0.5,
        "distinct_2": 0.7,
        "distinct_4": 0.9,
        "degenerate": False,
        "exact_match": True,
        "device": "cpu",
        "dtype": "float32",
        "status": "ok",
    }
    return row | changes


def failure(error: str = "out of memory", **cell: Any) -> dict[str, Any]:
    """A failed row: its measures are NULL, but the time of `ar` on the prompt is known."""
    measures = SAMPLES.names[SAMPLES.names.index("new_tokens") : SAMPLES.names.index("device")]
    keep = {"ar_wall_s", "ar_decode_s"}
    return sample(**cell) | {m: None for m in measures if m not in keep} | {"status": "failed", "error": error}


def replayed(**changes: Any) -> dict[str, Any]:
    """A SAMPLES row of the workload `replay`: no text and no times; 8 of its 20 positions are far-dependent."""
    row = sample(**changes)
    measures = SAMPLES.names[SAMPLES.names.index("new_tokens") : SAMPLES.names.index("device")]
    kept = {"rounds", "drafted", "accepted", "drafter_kv_bytes_peak", "drafter_cached_peak"}
    far = {"far_window": 512, "far_rounds": 8, "far_accepted": 2}
    return row | {m: None for m in measures if m not in kept} | far | {"workload": "replay", "rounds": 20}


def rounds(matches: list[tuple[int, int]], cell_key: str = "budgetdraft-1024-64-4") -> list[dict[str, Any]]:
    """ROUNDS rows of (drafted, accepted)."""
    same = dict.fromkeys(ROUNDS.names) | {
        "run_key": RUN,
        "cell_key": cell_key,
        "doc_id": "doc-0",
        "method": "budgetdraft",
        "workload": "greedy",
        "context": 1024,
        "budget": 64,
        "gamma": 4,
        "draft_s": 0.1,
        "select_s": 0.0,
        "verify_s": 0.1,
        "overhead_s": 0.0,
        "drafter_cached": 64,
        "drafter_kv_bytes": 100,
        "verifier_kv_bytes": 1000,
    }
    return [
        same | {"round": i, "drafted": drafted, "accepted": accepted, "emitted": accepted + 1}
        for i, (drafted, accepted) in enumerate(matches)
    ]


def store(workspace: Path, rows: list[dict[str, Any]], *, name: str = "part-0") -> Path:
    path = workspace / "results" / "samples" / f"run_key={rows[0]['run_key']}" / f"{name}.parquet"
    write_rows(path, rows, SAMPLES)
    return path


def store_rounds(workspace: Path, rows: list[dict[str, Any]]) -> None:
    write_rows(workspace / "results" / "rounds" / f"run_key={RUN}" / "part-0.parquet", rows, ROUNDS)


def grid(prompts: int = 6) -> list[dict[str, Any]]:
    """A small study: `sd_sparse` collapses with context, `budgetdraft` holds, the budget changes nothing for it."""
    rows = []
    for context in (1024, 2048, 4096):
        for doc in range(prompts):
            place = {"doc": doc, "context": context}
            jitter = doc % 3 - 1
            rows.append(sample(method="ar", **place))
            rows.append(sample(method="sd_full", budget=-1, accepted=24 + jitter, decode_s=0.9, **place))
            for budget in (64, 128):
                fading = {1024: 24, 2048: 16, 4096: 6}[context] + jitter
                rows.append(sample(method="sd_sparse", budget=budget, accepted=fading, **place))
                steady = sample(budget=budget, accepted=26 + jitter, decode_s=0.8 + 0.01 * doc, **place)
                rows.append(steady | {"degenerate": doc == 1})
    return rows


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace whose own name needs care in SQL and in globs."""
    path = tmp_path / "it's a [work] space"
    path.mkdir()
    return path


def one(workspace: Path, sql: str) -> dict[str, Any]:
    columns, rows = query(workspace, sql)
    assert len(rows) == 1
    return dict(zip(columns, rows[0], strict=True))


# --- views


def test_acceptance_and_speedups_are_ratios_of_sums(workspace):
    store(workspace, [
        sample(doc=0, drafted=10, accepted=1, decode_s=0.5),
        sample(doc=1, drafted=100, accepted=90, decode_s=4.5, degenerate=True),
    ])  # fmt: skip
    cell = one(workspace, "SELECT * FROM cells")
    assert cell["acceptance"] == pytest.approx(91 / 110)
    assert cell["acceptance_nondegenerate"] == pytest.approx(0.1)
    assert cell["degenerate_share"] == 0.5
    assert (cell["n"], cell["failed"], cell["exact_matches"]) == (2, 0, 2)
    speed = one(workspace, "SELECT * FROM speedups")
    assert speed["decode_speedup"] == pytest.approx(4.0 / 5.0)
    assert speed["end_to_end_speedup"] == pytest.approx(6.0 / 7.0)


def test_metric_definitions(workspace):
    """B52a: matches [1,0,1,1] and [1,1,1,1] at gamma 4: 5 of 8, 3.5 tokens a round, [1, .5, .5, .5] by position."""
    store(workspace, [sample(drafted=8, accepted=5, rounds=2)])
    store_rounds(workspace, rounds([(4, 1), (4, 4)]))
    cell = one(workspace, "SELECT acceptance, tokens_per_round FROM cells")
    assert cell == {"acceptance": 0.625, "tokens_per_round": 3.5}
    _, found = query(workspace, "SELECT acceptance, conditional FROM positions ORDER BY position")
    assert found == [(1.0, 1.0), (0.5, 0.5), (0.5, 1.0), (0.5, 1.0)]


def test_a_short_last_round_counts_only_what_it_drafted(workspace):
    store(workspace, [sample()])
    store_rounds(workspace, rounds([(4, 4), (2, 2)]))
    _, found = query(workspace, "SELECT drafted, accepted, conditional FROM positions ORDER BY position")
    assert found == [(2, 2, 1.0), (2, 2, 1.0), (1, 1, 1.0), (1, 1, 1.0)]


def test_a_gamma_sweep_at_a_constant_rate_is_no_collapse(workspace, tmp_path):
    """B52a: gamma 2, 4, 8 at rate .8 gives 2.44, 3.3616, 4.3289 tokens a round and .72, .5904, .4161."""
    rows = []
    for gamma, share in ((2, 0.72), (4, 0.5904), (8, 0.41611)):
        for context in (1024, 4096):
            rows += [
                sample(
                    doc=doc, context=context, gamma=gamma, drafted=1000 * gamma, accepted=round(1000 * gamma * share)
                )
                for doc in range(5)
            ]
    store(workspace, rows)
    _, found = query(
        workspace, "SELECT gamma, tokens_per_round, acceptance FROM cells WHERE context = 1024 ORDER BY gamma"
    )
    assert [g for g, _, _ in found] == [2, 4, 8]
    assert [t for _, t, _ in found] == pytest.approx([2.44, 3.3616, 4.3289], abs=1e-3)
    assert [a for _, _, a in found] == pytest.approx([0.72, 0.5904, 0.4161], abs=1e-3)
    page = build_report(workspace, RUN, tmp_path / "out", facts={})["report.md"].read_text()
    assert "does not collapse in 3 of 3 series" in page
    assert "**collapsed**" not in page


def test_a_failed_prompt_counts_on_neither_side_of_a_speedup(workspace):
    """`ar` has a time on the failed prompt; adding it would double the speedup."""
    store(workspace, [sample(doc=0), failure(doc=1)])
    assert one(workspace, "SELECT decode_speedup, n, failed FROM cells") == {"decode_speedup": 2.0, "n": 1, "failed": 1}


def test_undefined_is_null_and_skipped(workspace):
    """B48: of [0.5, undefined, 0.7] the best is 0.7 and the mean 0.6 over 2, with 1 undefined."""
    store(workspace, [
        sample(context=1024, drafted=10, accepted=5),
        sample(context=2048, drafted=0, accepted=0, decode_s=0.0),
        sample(context=4096, drafted=10, accepted=7),
    ])  # fmt: skip
    sql = (
        "SELECT max(acceptance) AS best, avg(acceptance) AS mean, count(acceptance) AS n, count(*) AS cells FROM cells"
    )
    assert one(workspace, sql) == {"best": 0.7, "mean": 0.6, "n": 2, "cells": 3}
    _, worst = query(workspace, "SELECT acceptance FROM cells ORDER BY acceptance NULLS LAST LIMIT 2")
    assert worst == [(0.5,), (0.7,)]
    assert one(workspace, "SELECT decode_speedup FROM speedups WHERE context = 2048") == {"decode_speedup": None}


def test_no_view_holds_nan_or_infinity(workspace):
    store(workspace, [*grid(2), failure(method="hf_assisted"), sample(context=64, drafted=0, accepted=0, decode_s=0.0)])
    for view in VIEWS:
        _, rows = query(workspace, f"SELECT * FROM {view}")
        assert all(math.isfinite(value) for row in rows for value in row if isinstance(value, float))


def old_file(path: Path, *, lacks: set[str]) -> None:
    """A file as an earlier version wrote it: some columns absent, others of Arrow's null type."""
    schema = pa.schema([field for field in SAMPLES if field.name not in lacks])
    nulls = {"first_mismatch", "accepted_at"}
    schema = pa.schema([pa.field(f.name, pa.null()) if f.name in nulls else f for f in schema])
    row = {name: value for name, value in sample(run_key="00000000000a").items() if name in schema.names}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row], schema=schema), path)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_old_files_read_the_same_in_either_order(workspace, order):
    """B47: no `temperature`, and `first_mismatch` and a list column all null."""
    folder = workspace / "results" / "samples"
    old_file(folder / "run_key=00000000000a" / f"{order[0]}.parquet", lacks={"temperature", "output_ids"})
    write_rows(
        folder / f"run_key={RUN}" / f"{order[1]}.parquet", [sample(first_mismatch=3, accepted_at=[2, 1])], SAMPLES
    )
    sql = "SELECT run_key, temperature, first_mismatch, accepted_at, output_ids FROM samples ORDER BY run_key"
    assert query(workspace, sql)[1] == [("00000000000a", None, None, None, None), (RUN, 0.0, 3, [2, 1], None)]
    _, types = query(workspace, "SELECT column_name, column_type FROM (DESCRIBE samples)")
    assert {"first_mismatch": "INTEGER", "accepted_at": "INTEGER[]", "temperature": "FLOAT"}.items() <= dict(
        types
    ).items()


def test_a_column_no_file_has_is_null(workspace, tmp_path):
    old_file(workspace / "results/samples/run_key=00000000000a/x.parquet", lacks={"drafter_cached_peak", "temperature"})
    assert one(workspace, "SELECT drafter_cached_peak, temperature FROM cells") == {
        "drafter_cached_peak": None,
        "temperature": None,
    }
    assert build_report(workspace, "00000000000a", tmp_path / "out", facts={})["report.html"].exists()


def test_frontier_and_paper_tables(workspace):
    rows = grid() + [
        sample(doc=doc, context=context, gamma=8, drafted=80, accepted=30 + doc % 2, decode_s=0.5)
        for doc in range(6)
        for context in (1024, 2048, 4096)
    ]
    store(workspace, rows)
    best = one(workspace, "SELECT * FROM frontier WHERE method = 'budgetdraft' AND context = 2048")
    assert (best["budget"], best["gamma"], best["decode_speedup"]) == (64, 8, 4.0)
    assert query(workspace, "SELECT count(*) FROM frontier")[1] == [(4 * 3,)]
    _, table = query(workspace, "SELECT context, budget, best_gamma FROM paper_table_1 ORDER BY ALL")
    assert table == [(c, b, 8 if b == 64 else 4) for c in (1024, 2048, 4096) for b in (64, 128)]
    _, table = query(workspace, "SELECT DISTINCT method, gamma FROM paper_table_2 ORDER BY method")
    assert table == [("ar", 0), ("budgetdraft", 4), ("sd_full", 4), ("sd_sparse", 4)]
    assert query(workspace, "SELECT count(*) FROM paper_table_3 WHERE gamma = 4")[1] == [(6,)]


def test_views_file_works_from_anywhere(workspace, monkeypatch, tmp_path):
    store(workspace, grid(2))
    text = write_views(workspace).read_text()
    assert text == render_views(workspace)
    monkeypatch.chdir(tmp_path)
    with duckdb.connect() as connection:
        connection.execute(text)
        connection.execute(text)  # twice: CREATE OR REPLACE
        names = {row[0] for row in connection.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()}
    assert names == VIEWS  # no rounds, no targets: no files


def test_targets_have_a_view_and_unfinished_folders_do_not_count(workspace):
    row = dict.fromkeys(TARGETS.names) | {
        "doc_id": "d", "source": "stdlib", "offset": 0, "prompt_ids": [1], "target_ids": [2], "mode": "forced",
        "finish_reason": "length", "topk_ids": [[2]], "topk_logprobs": [[-0.5]], "truncated": False,
    }  # fmt: skip
    write_rows(workspace / "targets" / ".k.partial" / "part-0.parquet", [row], TARGETS)
    assert "VIEW targets" not in render_views(workspace)
    write_rows(workspace / "targets" / "k" / "part-0.parquet", [row], TARGETS)
    store(workspace, [sample()])
    assert query(workspace, "SELECT doc_id, topk_logprobs FROM targets")[1] == [("d", [[-0.5]])]


def test_views_of_an_empty_workspace_are_none(workspace):
    assert "CREATE" not in write_views(workspace).read_text()
    with pytest.raises(FileNotFoundError, match=r"no results in .*`budgetdraft run`"):
        read(workspace, lambda connection: None)


def test_duckdb_cli_reads_the_views(workspace):
    """The command-line client lags behind the library and must read the same file."""
    client = shutil.which("duckdb")
    if client is None:
        pytest.skip("no duckdb command")
    store(workspace, grid(2))
    command = [client, "-init", str(write_views(workspace)), "-csv", "-c", "SELECT count(*) AS n FROM cells"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["n", "18"]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT nothing FROM cells", "nothing"),
        ("SELECT 1; SELECT 2", "exactly one statement, found 2"),
        ("", "exactly one statement, found 0"),
        ("COPY (SELECT 1) TO 'x.csv'", "found COPY"),
        ("EXPLAIN ANALYZE COPY (SELECT 1) TO 'x.csv'", "found EXPLAIN"),
        ("DROP VIEW cells", "found DROP"),
        ("SELEC 1", "syntax error"),
    ],
)
def test_a_bad_query_is_one_line(workspace, sql, message):
    store(workspace, [sample()])
    with pytest.raises(ValueError, match=r"^query: ") as caught:
        query(workspace, sql)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- report


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects what a reader meets."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A workspace with a small study in it; tests only read it."""
    path = tmp_path_factory.mktemp("study")
    store(path, [*grid(), failure("CUDA out of memory", doc=0, context=8192)])
    store_rounds(path, rounds([(4, 1), (4, 4)]))
    return path


@pytest.fixture(scope="module")
def report(study, tmp_path_factory) -> dict[str, Path]:
    return build_report(study, RUN, tmp_path_factory.mktemp("out"), facts=FACTS)


def test_report_is_well_formed_and_holds_every_figure(report):
    text = report["report.html"].read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    for name in ("acceptance", "acceptance-heat", "decode-speedup", "phases", "training-loss", "break-even"):
        assert f"fig-{name}" in page.ids
        assert f"figures/{name}.svg" in report
        alone = report[f"figures/{name}.svg"].read_text()
        Page(alone)
        assert 'xmlns="http://www.w3.org/2000/svg"' in alone
    drawings = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert len(drawings) == 7
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawings)
    tables = sum(tag == "table" for tag, _ in page.elements)
    assert tables == sum(tag == "caption" for tag, _ in page.elements) > 6
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.elements if tag == "th")


def test_report_loads_nothing(report):
    text = report["report.html"].read_text()
    assert not re.search(r"https?://", text)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in Page(text).elements}
    assert not [attrs for tag, attrs in Page(text).elements if tag == "script" and attrs.get("src")]
    references = re.findall(r"(?:href=\"|url\()([^\")]*)", text)
    assert references
    assert all(reference.startswith("#") for reference in references)
    assert {reference[1:] for reference in references} <= set(Page(text).ids)


@pytest.mark.parametrize("name", ["report.html", "report.md"])
def test_report_says_the_verdict_and_what_is_missing(report, name):
    text = " ".join(report[name].read_text().split())
    assert "sd_sparse collapses in 2 of 2 series" in text
    assert "Earliest: sd_sparse, budget 64, gamma 4: collapses at 4096 tokens" in text
    assert "budgetdraft does not collapse in 2 of 2 series" in text
    assert "The budget matters in 0 of 1 comparison over the same documents; more is worse in 0." in text
    assert "CUDA out of memory" in text
    assert "1 sample failed" in text
    assert "This run is partial: " in text
    assert "6 of 90 outputs are degenerate" in text


def test_report_shows_the_facts(report):
    for name in ("report.html", "report.md"):
        text = report[name].read_text()
        assert "synthetic" in text
        for value in ("grid.budgets", "64, 128", "2 cores", "attention_mass"):
            assert value in text


def test_documents_too_short_for_the_grid_are_counted_in_the_report(workspace, tmp_path):
    store(workspace, grid(prompts=4))
    facts = {"texts": {"tokens": 4223, "too_short": {"stdlib": 12, "pg19": 0}}}
    paths = build_report(workspace, RUN, tmp_path / "out", facts=facts)
    for name in ("report.html", "report.md"):
        how = paths[name].read_text().split("How it was measured")[1]
        assert "too short for the 4223 tokens of the grid are counted, never joined" in how
        assert "passed over: 12 of stdlib, 0 of pg19." in how
        assert "too_short" not in how


def test_numbers_in_the_report_are_those_of_the_rows(study, report):
    with report["tables/summary.csv"].open() as file:
        rows = list(csv.DictReader(file))
    row = next(r for r in rows if (r["method"], r["context"], r["budget"]) == ("budgetdraft", "1024", "64"))
    assert float(row["acceptance"]) == pytest.approx(0.65)
    assert float(row["lo"]) < 0.65 < float(row["hi"])
    assert row["exact"] == "6/6"
    assert next(r for r in rows if r["method"] == "ar")["acceptance"] == ""
    assert ">65.0 <small>[" in report["report.html"].read_text()
    known = summary_rows(study, RUN)
    assert len(known) == len(rows)
    for cell in known:
        sql = f"""SELECT acceptance, decode_speedup FROM cells WHERE method = '{cell["method"]}'
          AND context = {cell["context"]} AND budget = {cell["budget"]} AND gamma = {cell["gamma"]}"""
        assert one(study, sql) == pytest.approx({k: cell[k] for k in ("acceptance", "decode_speedup")})


def test_a_whole_run_is_not_called_partial(workspace, tmp_path):
    rows = grid()
    store(workspace, rows)
    for facts in ({}, {"expected_samples": len(rows)}):
        assert "partial" not in build_report(workspace, RUN, tmp_path / "out", facts=facts)["report.md"].read_text()


def test_a_partial_run_names_its_gaps(workspace, tmp_path):
    rows = grid()
    gone = [r for r in rows if (r["method"], r["context"]) == ("sd_full", 4096)][:2]
    store(workspace, [r for r in rows if r not in gone])
    text = build_report(workspace, RUN, tmp_path / "out", facts={"expected_samples": len(rows)})[
        "report.md"
    ].read_text()
    assert f"This run is partial: {len(rows) - 2} of {len(rows)} samples are there, 2 are missing." in text
    assert "| sd_full | multi_view | stdlib | greedy | 4096 | full | full | absolute | 4 | 2 |" in text


def test_a_run_where_everything_failed_still_reports(workspace, tmp_path):
    store(workspace, [failure("no such model", method=m, budget=b) for m, b in (("ar", -1), ("sd_sparse", 64))])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    assert "no such model" in paths["report.html"].read_text()
    Page(paths["report.html"].read_text())
    assert not [name for name in paths if name.startswith("figures/")]


def test_a_failed_sample_names_its_drafter_and_its_temperature(workspace, tmp_path):
    drawn = failure("out of memory", drafter_name="deep", workload="sampled", temperature=0.8)
    store(workspace, [*grid(prompts=4), drawn, failure("no drafter", method="ngram", drafter_name=None)])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    listed = {row["error"]: row for row in csv.DictReader(paths["tables/failed.csv"].open())}
    assert listed["out of memory"]["drafter_name"] == "deep"
    assert float(listed["out of memory"]["temperature"]) == pytest.approx(0.8)
    page, plain = paths["report.html"].read_text(), paths["report.md"].read_text()
    columns = ["Method", "Drafter", "Corpus", "Workload", "Temperature", "Context"]
    assert f"| {' | '.join(columns)} | Budget |" in plain.split("## Failed samples")[1]
    assert "| budgetdraft | deep | stdlib | sampled | 0.8 | 1024 | 64 |" in plain
    assert "| ngram | - | stdlib | greedy | 0 | 1024 | 64 |" in plain
    table = page.split('id="t-failed"')[1].split("</table>")[0]
    assert re.findall(r'<th scope="col"[^>]*>(\w+)</th>', table)[:6] == columns
    assert "<td>deep</td><td>stdlib</td><td>sampled</td>" in table


def test_one_prompt_is_never_shown_as_certainty(workspace, tmp_path):
    store(workspace, grid(prompts=1))
    text = build_report(workspace, RUN, tmp_path / "out", facts={})["report.html"].read_text()
    assert "[no interval]" in text
    assert "1 of the 4 prompts needed at 1024 tokens" in text
    assert "cannot be judged in 2 of 2 series" in text


def test_markup_in_rows_and_facts_is_text(workspace, tmp_path):
    evil = "<script>alert(1)</script>"
    rows = [
        sample(method="ar", corpus=evil, output_text=evil),
        sample(corpus=evil, doc=0, output_text=f"{evil} $x$ | y"),
    ]
    store(workspace, [*rows, sample(method="ar", corpus="b"), failure(evil, corpus=evil, doc=3)])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={"study": evil, evil: {evil: [evil]}})
    for name, path in paths.items():
        if not name.startswith("tables/"):
            assert "<script>alert" not in path.read_text(), name
    page = Page(paths["report.html"].read_text())
    assert sum(tag == "script" for tag, _ in page.elements) == 1


def test_an_unknown_run_is_one_line(workspace, tmp_path):
    store(workspace, [sample()])
    with pytest.raises(FileNotFoundError, match=f"run_key = ffffffffffff: no results in .*; found {RUN}"):
        build_report(workspace, "ffffffffffff", tmp_path / "out", facts={})


def test_the_same_rows_give_the_same_report(study, report, tmp_path):
    again = build_report(study, RUN, tmp_path, facts=FACTS)
    assert list(again) == list(report)
    assert all(again[name].read_bytes() == report[name].read_bytes() for name in report)


def test_variants_are_told_apart_only_where_they_vary(workspace):
    rows = grid(4)
    store(workspace, rows)
    assert {row["setting"] for row in summary_rows(workspace, RUN)} == {""}
    other = [r | {"drafter_name": "l_a_only", "drafter_key": "d1"} for r in rows if r["method"] == "budgetdraft"]
    store(workspace, [*rows, *other])
    settings = {(r["method"], r["setting"]) for r in summary_rows(workspace, RUN)}
    assert {("budgetdraft", "drafter l_a_only"), ("budgetdraft", "drafter multi_view"), ("ar", "")} <= settings


def replay_study() -> list[dict[str, Any]]:
    """Greedy and replay, two policies and two position modes for sparse caches, the full cache once."""
    rows = []
    for context in (1024, 2048, 4096):
        for doc in range(5):
            place = {"context": context, "doc": doc}
            rows.append(sample(method="ar", **place))
            for make in (sample, replayed):
                rows.append(make(method="sd_full", budget=-1, accepted=30 + doc, **place))
                for policy, accepted in (("attention_mass", 24), ("random", 24 if context == 1024 else 4)):
                    for mode in ("absolute", "in_cache"):
                        rows.append(make(policy=policy, position_mode=mode, accepted=accepted + doc % 2, **place))
    return rows


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    store(path, replay_study())
    return path


@pytest.fixture(scope="module")
def mixed_report(mixed, tmp_path_factory) -> dict[str, Path]:
    return build_report(mixed, RUN, tmp_path_factory.mktemp("out"), facts={"expected_samples": len(replay_study())})


def test_a_replay_has_acceptance_and_far_acceptance_but_no_speedup(mixed):
    sql = "SELECT * FROM cells WHERE workload = 'replay' AND policy = 'random' AND position_mode = 'in_cache'"
    cell = one(mixed, f"{sql} AND context = 2048")
    assert cell["acceptance"] == pytest.approx((3 * 4 + 2 * 5) / 200) == cell["acceptance_nondegenerate"]
    assert (cell["far_window"], cell["far_rounds"], cell["far_accepted"], cell["far_acceptance"]) == (512, 40, 10, 0.25)
    assert cell["tokens_per_round"] == pytest.approx(1 + 22 / 100)
    assert cell["decode_speedup"] is cell["end_to_end_speedup"] is cell["degenerate_share"] is None
    greedy = one(mixed, f"{sql.replace('replay', 'greedy')} AND context = 2048")
    assert greedy["far_acceptance"] is None and greedy["decode_speedup"] == 2.0
    assert one(mixed, "SELECT count(*) AS n FROM frontier WHERE workload = 'replay'") == {"n": 0}


def test_workloads_policies_and_modes_are_never_added_up(mixed, mixed_report):
    known = summary_rows(mixed, RUN)
    assert len(known) == 3 * (1 + 2 * (1 + 4))
    assert {row["n"] for row in known} == {5}
    settings = {row["setting"] for row in known if row["method"] == "budgetdraft"}
    assert settings == {
        f"{w}, {p}, {m}"
        for w in ("greedy", "replay")
        for p in ("attention_mass", "random")
        for m in ("absolute", "in_cache")
    }
    assert {r["setting"] for r in known if r["method"] == "sd_full"} == {"greedy", "replay"}
    page = " ".join(mixed_report["report.md"].read_text().split())
    for workload in ("greedy", "replay"):
        name = f"budgetdraft, {workload}, random, in_cache, budget 64, gamma 4"
        assert f"**collapsed**: {name}: collapses at 2048 tokens" in page
        calm = name.replace("random", "attention_mass")
        assert f"**not reached**: {calm}: does not collapse up to 4096 tokens" in page


def test_a_report_with_replay_rows_is_whole(mixed_report):
    text, plain = mixed_report["report.html"].read_text(), mixed_report["report.md"].read_text()
    page = Page(text)
    assert {"fig-acceptance", "fig-acceptance-heat", "fig-decode-speedup", "fig-phases", "far", "t-far"} <= set(
        page.ids
    )
    assert "partial" not in plain
    assert "| budgetdraft | replay, random, in_cache | 2048 | 64 | 4 | 512 | 40 | 100 |" in plain
    speeds = next(a["aria-label"] or "" for t, a in page.elements if t == "svg" and "2.00 x" in (a["aria-label"] or ""))
    assert "greedy" in speeds and "replay" not in speeds
    assert "outputs are degenerate" not in plain


def test_a_study_without_replay_has_no_far_table(report):
    assert "Far-dependent tokens" not in report["report.html"].read_text()
    assert "Far-dependent tokens" not in report["report.md"].read_text()


def test_replay_rows_alone_make_a_report(workspace, tmp_path):
    store(workspace, [row for row in replay_study() if row["workload"] == "replay"])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    Page(paths["report.html"].read_text())
    assert "figures/acceptance.svg" in paths and "figures/decode-speedup.svg" not in paths


def test_loops_are_counted_among_written_texts_alone(workspace, tmp_path):
    greedy = [sample(doc=doc, degenerate=doc == 0) for doc in range(5)]
    store(workspace, [*greedy, *(replayed(doc=doc) for doc in range(5))])
    page = build_report(workspace, RUN, tmp_path / "out", facts={})["report.md"].read_text()
    assert "1 of 5 outputs are degenerate" in page


def test_one_position_mode_is_no_variant_though_the_full_cache_has_another(workspace):
    sparse = [sample(doc=doc, position_mode="in_cache", refresh=2) for doc in range(4)]
    store(workspace, [*sparse, *(sample(doc=doc, budget=-1) for doc in range(4))])
    assert {row["setting"] for row in summary_rows(workspace, RUN)} == {""}


# --- marks, positions, speed, ceilings


def test_accepted_drafts_are_marked_in_the_output_shown(workspace, tmp_path):
    text = "a<b and so on"
    store(workspace, [
        sample(method="ar", output_text=text),
        sample(output_text=text, accepted_spans=[1, 3, 8, 13], accepted=7, new_tokens=32),
    ])  # fmt: skip
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    html, markdown = paths["report.html"].read_text(), paths["report.md"].read_text()
    marked = "a<mark>&lt;b</mark> and <mark>so on</mark></pre>"
    assert marked in html
    assert marked in markdown
    assert "7 of 32 tokens accepted drafts" in html


@pytest.mark.parametrize(
    ("spans", "pieces"),
    [
        ([], [("abcdef", False)]),
        ([0, 6], [("abcdef", True)]),
        ([1, 4, 3, 5], [("a", False), ("bcd", True), ("e", True), ("f", False)]),
    ],
)
def test_pieces_hold_the_whole_text_once(spans, pieces):
    assert in_pieces("abcdef", spans) == pieces


def test_a_long_text_is_cut_and_so_are_its_marks():
    pieces = in_pieces("x" * (TEXT_LIMIT + 7), [TEXT_LIMIT - 2, TEXT_LIMIT + 5])
    assert pieces == [("x" * (TEXT_LIMIT - 2), False), ("xx", True), (" [... 7 more characters]", False)]


def test_where_in_a_round_drafts_die(workspace, tmp_path):
    """Of 5 rounds of 3 drafts: 4 survive the first, 2 of those the second, 2 of those the third."""
    store(workspace, [
        sample(doc=0, gamma=3, cell_key="cell"),
        sample(doc=0, gamma=2, cell_key="short"),
        sample(doc=0, gamma=3, context=512, cell_key="near"),
    ])  # fmt: skip
    store_rounds(workspace, [
        *rounds([(3, 3), (3, 3), (3, 1), (3, 1), (3, 0)], cell_key="cell"),
        *rounds([(2, 0)] * 9, cell_key="short"),
        *rounds([(3, 0)] * 9, cell_key="near"),
    ])  # fmt: skip
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    found = list(csv.DictReader(paths["tables/deaths.csv"].open()))
    assert {row["by"] for row in found} == {"position in the draft, greedy, gamma 3"}
    assert [(row["label"], float(row["acceptance"])) for row in found] == [("1", 0.8), ("2", 0.5), ("3", 1.0)]
    assert [float(row["of_all_rejections"]) for row in found] == pytest.approx([100 / 3, 200 / 3, 0], abs=0.05)
    assert "0.80 at 1, 0.50 at 2, 1.00 at 3" in paths["figures/positions.svg"].read_text()


def deaths_of(paths: dict[str, Path], label: str) -> dict[str, float]:
    rows = csv.DictReader(paths["tables/deaths.csv"].open())
    return {row["drafter"]: float(row["acceptance"]) for row in rows if row["label"] == label}


def test_deaths_of_methods_and_temperatures_that_share_a_drafter_are_never_added_up(workspace, tmp_path):
    """One budget, policy and drafter; each of 4 rounds of a cell is accepted in as many as its number says."""
    cells = {
        "greedy": sample(method="sd_sparse", drafter_name="base"),
        "two levels": sample(method="triforce", drafter_name="base"),
        "cool": sample(method="sd_sparse", drafter_name="base", workload="sampled", temperature=0.5),
        "hot": sample(method="sd_sparse", drafter_name="base", workload="sampled", temperature=1.0),
        "alone": sample(),
    }
    store(workspace, [row | {"cell_key": key} for key, row in cells.items()])
    store_rounds(workspace, [r for i, key in enumerate(cells) for r in rounds([(4, 4)] * i + [(4, 0)] * (4 - i), key)])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    assert deaths_of(paths, "1") == {
        "base, sd_sparse": 0.0,
        "base, triforce": 0.25,
        "base, sd_sparse, temperature 0.5": 0.5,
        "base, sd_sparse, temperature 1": 0.75,
        "multi_view": 1.0,
    }
    lines = paths["figures/positions.svg"].read_text()
    assert "base, triforce, budget 64" in lines and "base, sd_sparse, budget 64" in lines


def test_deaths_by_token_are_those_of_one_method(workspace, tmp_path):
    methods = {"sd_full": (0, -1), "self_sparse": (2, 64), "sd_sparse": (4, 64), "streaming": (3, 64)}
    drafters = {"self_sparse": "self"}
    store(workspace, [
        replayed(method=method, budget=budget, drafter_name=drafters.get(method, "base"), cell_key=method)
        for method, (_, budget) in methods.items()
    ])  # fmt: skip
    store_rounds(workspace, [
        row | {"token_class": "word", "evidence": 9}
        for method, (accepted, _) in methods.items()
        for row in rounds([(1, 1)] * accepted + [(1, 0)] * (4 - accepted), method)
    ])  # fmt: skip
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    assert deaths_of(paths, "word") == deaths_of(paths, "1 to 64") == {
        "base, sd_full": 0.0, "self": 0.5, "base, streaming": 0.75, "base, sd_sparse": 1.0,
    }  # fmt: skip


def test_where_speculation_stops_paying(workspace, tmp_path):
    rows = [
        row
        for context, seconds in ((1024, 1.0), (4096, 3.0))
        for doc in range(6)
        for row in (
            sample(method="ar", doc=doc, context=context),
            sample(doc=doc, context=context, decode_s=seconds + 0.01 * doc),
        )
    ]
    store(workspace, rows)
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    [row] = csv.DictReader(paths["tables/speedup-boundaries.csv"].open())
    assert (row["verdict"], row["slower_from"], row["point_below_1_from"]) == ("collapsed", "4096", "4096")
    assert "slower than the verifier alone at some context in 1 of 1 series" in paths["report.md"].read_text()


def test_ceilings_are_drawn_grey_under_the_curves(workspace, tmp_path):
    rows = [
        row
        for context in (1024, 4096)
        for doc in range(4)
        for row in (
            sample(doc=doc, context=context, accepted=20 + doc),
            sample(method="self_sparse", drafter_name="self", doc=doc, context=context, accepted=30 + doc),
        )
    ]
    store(workspace, rows)
    figure = build_report(workspace, RUN, tmp_path / "out", facts={})["figures/acceptance.svg"].read_text()
    assert "ceiling: self_sparse" in figure
    assert "stroke: #808080; stroke-opacity: 0.8; stroke-width: 1.2" in figure


def test_missing_prompts_are_counted_drafter_by_drafter(workspace, tmp_path):
    store(workspace, [sample(doc=0), sample(doc=1), sample(doc=0, drafter_name="other", drafter_key="d1")])
    cell = {name: sample()[name] for name in ("method", "corpus", "workload", "context", "budget", "gamma", "policy")}
    planned = [cell | {"position_mode": "absolute", "drafter_name": n, "prompts": 2} for n in ("multi_view", "other")]
    page = build_report(workspace, RUN, tmp_path / "out", facts={"expected_samples": 4, "planned": planned})
    missing = page["report.md"].read_text().split("## Prompts not measured")[1].split("\n## ")[0]
    assert [line for line in missing.splitlines() if "budgetdraft" in line] == [
        "| budgetdraft | other | stdlib | greedy | 1024 | 64 | attention_mass | absolute | 4 | 1 |"
    ]


def test_the_verdict_on_the_budget_is_that_of_the_paired_test(workspace, tmp_path):
    """Documents differ more than budgets do: side by side the intervals overlap, document by document it is plain."""
    rows = [
        sample(doc=doc, budget=budget, drafted=200, accepted=20 * doc + more * (8 + doc % 3))
        for doc in range(1, 9)
        for budget, more in ((64, 0), (128, 1))
    ]
    store(workspace, rows)
    page = build_report(workspace, RUN, tmp_path / "out", facts={})["report.md"].read_text()
    assert "The budget matters in 1 of 1 comparison over the same documents; more is worse in 0." in page
    assert "**no effect**" in page
