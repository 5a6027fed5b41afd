"""Damaged files are named and left out; files that come and go under a reader do not break it; a partial run says what
is missing."""

import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from bdcore.config import GridConfig
from bdcore.decoding.methods import METHODS
from bdcore.evaluation.grid import cells
from bdcore.schema import SAMPLES, write_rows
from flows.cli import app
from reports import tables
from reports.build import build_report
from reports.measured import summary_rows
from reports.parts import fault, find
from reports.tables import query, read
from tasks.reporting import planned
from tests.unit.test_reports import RUN, failure, grid, rounds, sample, store, store_rounds


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    path = tmp_path / "it's a [work] space"
    path.mkdir()
    return path


def zeroed(data: bytes) -> bytes:
    """A file of the right size and ends whose rows were never written, as a full disk or a lost machine leaves one."""
    return data[:4] + bytes(len(data) // 2) + data[4 + len(data) // 2 :]


DAMAGE = {
    "empty": lambda data: b"",
    "a few bytes": lambda data: b"PAR1 cut",
    "half": lambda data: data[: len(data) // 2],
    "no end": lambda data: data[:-4],
    "zeros inside": zeroed,
    "no footer": lambda data: data[:4] + bytes(len(data) - 8) + data[-4:],
    "text": lambda data: b"run_key,method\n" * 100,
}


def damage(path: Path, how: str, name: str = "damaged.parquet") -> Path:
    """A damaged copy of a file beside it."""
    copy = path.with_name(name)
    copy.write_bytes(DAMAGE[how](path.read_bytes()))
    return copy


# --- damaged files


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named_and_left_out_of_a_query(workspace, how, caplog):
    damaged = damage(store(workspace, [sample(doc=doc) for doc in range(3)]), how)
    assert query(workspace, "SELECT sum(accepted), max(output_text) FROM samples")[1] == [(60, "text of 2")]
    assert [r.getMessage().split(" is left out: ")[0] for r in caplog.records] == [str(damaged)]
    _, named = query(workspace, "SELECT file, reason FROM skipped_files")
    if how not in ("zeros inside", "no footer"):  # these look whole until they are read
        assert [file for file, _ in named] == [f"results/samples/run_key={RUN}/damaged.parquet"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_report_names_what_it_left_out(workspace, tmp_path, how):
    damage(store(workspace, grid(4)), how)
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    for name in ("report.html", "report.md"):
        text = paths[name].read_text()
        assert "1 damaged file left out" in text and "damaged.parquet" in text
    assert "damaged.parquet" in paths["tables/skipped.csv"].read_text()
    assert {row["n"] for row in summary_rows(workspace, RUN)} == {4}


def test_damaged_rounds_cost_only_themselves(workspace, tmp_path):
    store(workspace, grid(4))
    store_rounds(workspace, rounds([(4, 1), (4, 4)]))
    (whole,) = (workspace / "results" / "rounds").rglob("*.parquet")
    damage(whole, "empty")
    damage(whole, "zeros inside", "zeroed.parquet")
    assert query(workspace, "SELECT sum(drafted) FROM positions")[1] == [(8,)]
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    text = paths["report.md"].read_text()
    assert "2 damaged files left out" in text and "damaged.parquet (0 bytes)" in text and "zeroed.parquet" in text
    whole.unlink()
    assert "tables/positions.csv" not in build_report(workspace, RUN, tmp_path / "out2", facts={})


def test_a_column_of_another_type_is_damage_too(workspace):
    path = store(workspace, [sample()])
    pq.write_table(pa.table({"run_key": [RUN], "rounds": ["many"]}), path.with_name("other.parquet"))
    assert query(workspace, "SELECT sum(rounds) FROM samples")[1] == [(10,)]


def test_results_that_are_all_damaged_are_one_line(workspace, tmp_path):
    damage(store(workspace, [sample()]), "half").replace(
        workspace / "results" / "samples" / f"run_key={RUN}" / "part-0.parquet"
    )
    for reading in (
        lambda: query(workspace, "SELECT 1"),
        lambda: build_report(workspace, RUN, tmp_path / "out", facts={}),
    ):
        with pytest.raises(ValueError, match=r"cannot be read: .*part-0\.parquet: .*a rerun rebuilds it") as caught:
            reading()
        assert "\n" not in str(caught.value)


def test_the_command_says_which_file_it_left_out(workspace, monkeypatch):
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(workspace))
    damage(store(workspace, [sample()]), "half")
    done = CliRunner().invoke(app, ["query", "select accepted from samples", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == [{"accepted": 20}]
    assert "damaged.parquet is left out: cut off" in done.stderr


def test_the_ends_of_a_file_tell(tmp_path):
    whole = store(tmp_path, [sample()])
    assert fault(whole) is None
    assert fault(damage(whole, "empty")) == "0 bytes"
    assert fault(damage(whole, "half")) == "cut off, or no Parquet file"
    assert fault(tmp_path) is not None and fault(tmp_path / "none.parquet") is not None


def test_a_query_that_is_wrong_is_not_taken_for_damage(workspace):
    store(workspace, [sample()])
    with pytest.raises(ValueError, match=r"^query: .*nothing"):
        query(workspace, "SELECT nothing FROM samples")
    with pytest.raises(ValueError, match=r"^query: .*elsewhere"):
        query(workspace, f"SELECT * FROM read_parquet('{workspace.name[-5:]}/elsewhere.parquet')")


# --- while the grid writes


def test_a_file_that_vanishes_between_listing_and_reading_is_no_fault(workspace, monkeypatch, caplog):
    gone = store(workspace, [sample(doc=1)], name="gone")
    damage(store(workspace, [sample(doc=0)]), "half")  # so that files are read by name
    listed = []

    def then_gone(*arguments):
        listed.append(find(*arguments))
        gone.unlink(missing_ok=True)
        return listed[-1]

    monkeypatch.setattr(tables, "find", then_gone)
    assert query(workspace, "SELECT doc_id FROM samples")[1] == [("doc-0",)]
    assert gone in listed[0].files["samples"] and gone not in listed[1].files["samples"]
    assert "gone.parquet" not in caplog.text


def test_a_file_that_never_stays_is_an_error_in_the_end(workspace, monkeypatch):
    store(workspace, [sample()])
    parts = find(workspace)
    ghost = parts.root / "results" / "samples" / f"run_key={RUN}" / "ghost.parquet"
    haunted = {**parts.files, "samples": [*parts.files["samples"], ghost]}
    monkeypatch.setattr(tables, "find", lambda *_: type(parts)(parts.root, None, haunted, {}, frozenset({"samples"})))
    with pytest.raises(ValueError, match=r"ghost\.parquet"):
        query(workspace, "SELECT * FROM samples")


def test_a_file_that_appears_while_a_report_reads_is_in_it_or_not(workspace, tmp_path):
    store(workspace, grid(4))

    def work(connection):
        write_rows(workspace / "results/samples" / f"run_key={RUN}" / "late.parquet", [sample(doc=99)], SAMPLES)
        (workspace / "results/samples" / f"run_key={RUN}" / "late2.parquet").write_bytes(b"")
        return connection.execute("SELECT count(*), sum(n + failed) FROM samples, cells").fetchall()[0][0]

    assert read(workspace, work, run_key=RUN) == len(grid(4)) * 18
    assert query(workspace, "SELECT count(*) FROM samples")[1] == [(len(grid(4)) + 1,)]


def test_reading_while_a_grid_writes(workspace, tmp_path):
    """A writer replaces, adds and removes files all the while; every reading is of whole files."""
    folder = workspace / "results" / "samples" / f"run_key={RUN}"
    place = [sample(method="ar"), sample()]
    write_rows(folder / "part-0.parquet", place, SAMPLES)
    stop = threading.Event()

    def write() -> None:
        for i in range(10**6):
            if stop.is_set():
                return
            write_rows(folder / "part-0.parquet", place, SAMPLES)
            write_rows(
                folder / f"part-{1 + i % 3}.parquet", [row | {"doc_id": f"doc-{1 + i % 3}"} for row in place], SAMPLES
            )
            (folder / f"part-{1 + (i + 1) % 3}.parquet").unlink(missing_ok=True)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(15):
            _, found = query(
                workspace, "SELECT doc_id, count(*), sum(drafted) FROM samples GROUP BY doc_id ORDER BY doc_id"
            )
            assert found[0] == ("doc-0", 2, 40) and all(row[1:] == (2, 40) for row in found)
        assert build_report(workspace, RUN, tmp_path / "out", facts={})["report.md"].exists()
    finally:
        stop.set()
        writer.join()
    assert not [path for path in Path(folder).iterdir() if path.name.endswith(".partial")]


# --- what is missing


def planned_study() -> list[dict]:
    config = GridConfig(
        corpus=[{"source": "stdlib", "split": "test"}], contexts=[1024, 2048, 4096], budgets=[64, 128], gammas=[4],
        prompts=6,
    )  # fmt: skip
    return planned(config)


def measured() -> list[dict]:
    """The rows of that plan, with the drafters' names it has."""
    return [row | {"drafter_name": METHODS[row["method"]].drafter} for row in grid()]


def test_what_is_planned_is_every_cell_with_its_prompts():
    plan = planned_study()
    assert len(plan) == 3 * (1 + 1 + 2 + 2) and {cell["prompts"] for cell in plan} == {6}
    assert sum(cell["prompts"] for cell in plan) == len(measured())


def test_a_context_that_was_never_begun_is_missing(workspace, tmp_path):
    """No row tells of it: only the plan does."""
    store(workspace, [row for row in measured() if row["context"] < 4096])
    facts = {"planned": planned_study(), "expected_samples": len(measured())}
    text = build_report(workspace, RUN, tmp_path / "out", facts=facts)["report.md"].read_text()
    assert "This run is partial: 72 of 108 samples are there, 36 are missing." in text
    for line in (
        "ar | - | stdlib | greedy | 4096 | full | full | absolute | 0 | 6",
        "budgetdraft | trained | stdlib | greedy | 4096 | 128 | attention_mass | absolute | 4 | 6",
    ):
        assert f"| {line} |" in text
    missing = text.split("## Prompts not measured")[1].split("\n## ")[0]
    assert missing.count("| greedy | 4096 |") == 6 and "| greedy | 1024 |" not in missing


def test_a_document_whose_only_file_is_damaged_is_missing_and_the_file_is_named(workspace, tmp_path):
    lost = [row for row in measured() if (row["doc_id"], row["context"]) == ("doc-5", 4096)]
    path = store(workspace, lost, name="lost")
    path.write_bytes(path.read_bytes()[:100])
    store(workspace, [row for row in measured() if row not in lost])
    facts = {"planned": planned_study(), "expected_samples": len(measured())}
    text = build_report(workspace, RUN, tmp_path / "out", facts=facts)["report.md"].read_text()
    assert "102 of 108 samples are there, 6 are missing" in text and "lost.parquet (cut off" in text
    assert "| sd_full | base | stdlib | greedy | 4096 | full | full | absolute | 4 | 1 |" in text


def test_a_failed_sample_is_failed_and_not_missing(workspace, tmp_path):
    rows = [row for row in measured() if row["method"] != "sd_full"]
    rows += [
        failure(method="sd_full", drafter_name="base", budget=-1, doc=doc, context=context)
        for doc in range(6)
        for context in (1024, 2048, 4096)
    ]
    store(workspace, rows)
    facts = {"planned": planned_study(), "expected_samples": len(measured())}
    text = build_report(workspace, RUN, tmp_path / "out", facts=facts)["report.md"].read_text()
    assert "18 samples failed" in text and "This run is partial" not in text and "## Prompts not measured" not in text


def test_many_failures_are_counted_and_the_first_are_shown(workspace, tmp_path):
    store(workspace, [sample(), *(failure(f"fault {doc:04d}", doc=doc) for doc in range(1, 300))])
    paths = build_report(workspace, RUN, tmp_path / "out", facts={})
    assert paths["tables/failed.csv"].read_text().count("fault") == 299
    for name in ("report.html", "report.md"):
        text = paths[name].read_text()
        assert text.count("fault 0") == 200 and "299" in text and "tables/failed.csv" in text


def test_the_plan_follows_the_grid():
    config = GridConfig(corpus=[{"source": "stdlib"}, {"source": "pg19"}], prompts=3)
    assert len(planned(config)) == 2 * len(cells(config))
