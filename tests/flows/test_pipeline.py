"""The pipeline as its users meet it: rows, reuse, damage, failing cells, MLflow runs, the report."""

import re
import shutil

import duckdb
import pyarrow.parquet as pq
import pytest
import torch
from mlflow.tracking import MlflowClient

from bdcore.identity import read_manifest
from bdcore.models.drafter import load_drafter, read_facts
from bdcore.study import open_study
from bdcore.workspace import REPOSITORY
from flows.evaluation import evaluation
from flows.pipeline import pipeline
from flows.targets import targets
from flows.training import training
from reports.tables import query
from tests.conftest import tiny_llama
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def finished(tmp_path_factory, study_config):
    """A workspace in which the whole pipeline has run once."""
    root = tmp_path_factory.mktemp("finished") / "workspace"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUDGETDRAFT_HOME", str(root))
        pipeline(str(study_config))
    return root


@pytest.fixture
def used(finished, tmp_path, monkeypatch):
    """A copy of the finished workspace."""
    root = tmp_path / "workspace"
    shutil.copytree(finished, root, symlinks=True)
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(root))
    return root


def rows_of(root, kind):
    # ParquetFile: read_table would take run_key from the folder's name too, as another type
    files = sorted((root / kind).rglob("part-*.parquet"))
    return [row for path in files for row in pq.ParquetFile(path).read().to_pylist()]


def samples(root, **where):
    return [row for row in rows_of(root, "results/samples") if all(row[k] == v for k, v in where.items())]


def times(root, pattern="*"):
    return {p: p.stat().st_mtime_ns for p in root.rglob(pattern) if p.is_file()}


def test_every_cell_is_measured_on_every_prompt(finished):
    rows = samples(finished)
    # per context: ar, sd_full, sd_sparse at 2 budgets, budgetdraft at 3; 2 contexts, 2 prompts
    assert len(rows) == 7 * 2 * 2
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["method"] for row in rows} == {"ar", "sd_full", "sd_sparse", "budgetdraft"}


def test_every_greedy_output_equals_the_verifier_alone(finished):
    rows = samples(finished)
    assert all(row["exact_match"] for row in rows)
    assert all(row["new_tokens"] == 12 or row["finish_reason"] == "eos" for row in rows)


def test_no_drafter_cache_exceeds_its_budget_and_the_block_in_flight(finished):
    for row in samples(finished):
        if row["budget"] > 0:
            assert row["drafter_cached_peak"] <= row["budget"] + row["gamma"] + 1
    rounds = rows_of(finished, "results/rounds")
    assert rounds
    assert all(r["drafter_cached"] <= r["budget"] for r in rounds if r["budget"] > 0)


def test_the_same_documents_stand_at_every_context_and_none_was_trained_on(finished):
    by_context = {c: {r["doc_id"] for r in samples(finished, context=c)} for c in (64, 128)}
    assert by_context[64] == by_context[128]
    assert not by_context[64] & {row["doc_id"] for row in rows_of(finished, "targets")}


def test_documents_too_short_for_the_grid_are_counted_in_its_manifest_and_its_report(finished):
    [manifest] = [read_manifest(folder) for folder in (finished / "results" / "samples").glob("run_key=*")]
    assert manifest["texts"] == {"tokens": 128, "too_short": {"folder": 0}}
    [page] = (finished / "reports").rglob("report.md")
    assert "too short for the 128 tokens of the grid are counted, never joined; passed over: 0 of" in page.read_text()


def test_a_second_run_reuses_everything(used, study_config):
    before = times(used, "*.parquet") | times(used, "*.safetensors") | times(used, "report.html")
    ref = pipeline(str(study_config))
    assert ref.reused
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(samples(used)) == 28


def test_a_deleted_and_a_damaged_shard_are_made_again_alike(used, study_config):
    study = open_study(str(study_config))
    shards = sorted((used / "targets" / study.keys.targets).glob("part-*.parquet"))
    wanted = [pq.read_table(p).to_pylist() for p in shards]
    shards[0].unlink()
    shards[1].write_bytes(b"PAR1" + b"\0" * 96)
    kept = shards[2].stat().st_mtime_ns
    targets(str(study_config))
    assert [pq.read_table(p).to_pylist() for p in shards] == wanted
    assert shards[2].stat().st_mtime_ns == kept


def test_a_lost_prompt_is_measured_again_and_the_others_are_kept(used, study_config):
    files = sorted((used / "results" / "samples").rglob("part-*.parquet"))
    files[1].unlink()
    kept = {p: p.stat().st_mtime_ns for p in files if p != files[1]}
    before = {(r["cell_key"], r["doc_id"]): r["output_ids"] for r in samples(used)}
    pipeline(str(study_config))
    rows = samples(used)
    assert len(rows) == 28
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert all(before.get((r["cell_key"], r["doc_id"]), r["output_ids"]) == r["output_ids"] for r in rows)


def untimed(rows):
    """What must repeat: everything but seconds and the name of the run, in an order of its own."""
    kept = [{k: v for k, v in row.items() if not k.endswith("_s") and k != "run_key"} for row in rows]
    return sorted(kept, key=lambda row: (row["cell_key"], row["doc_id"], row.get("round", 0)))


def test_the_same_study_in_another_workspace_writes_the_same_rows(finished, workspace, study_config):
    """Targets and drafters are made anew as well."""
    evaluation(str(study_config))
    for kind in ("results/samples", "results/rounds"):
        assert untimed(rows_of(workspace, kind)) == untimed(rows_of(finished, kind)) != []


def test_cells_in_another_order_write_the_same_rows(finished, used, study_config):
    order = ["grid.methods=[budgetdraft, sd_sparse, sd_full, ar]", "grid.contexts=[128, 64]"]
    evaluation(str(study_config), [*order, "grid.budgets=[full, 48, 32]"])
    for kind in ("results/samples", "results/rounds"):
        before = rows_of(finished, kind)
        after = [row for row in rows_of(used, kind) if row["run_key"] != before[0]["run_key"]]
        assert untimed(after) == untimed(before) != []


def test_a_changed_setting_makes_new_artifacts_beside_the_old(used, study_config):
    pipeline(str(study_config), ["grid.gammas=[2]"])
    assert len(list((used / "results" / "samples").glob("run_key=*"))) == 2
    assert len([p for p in (used / "drafters").iterdir() if p.is_dir()]) == 2  # base and trained, both reused


def test_a_failed_cell_is_a_row_the_others_go_on_and_the_flow_is_not_green(workspace, study_config, monkeypatch):
    import bdcore.evaluation.cell as cell

    real = cell.decode

    def failing(start, drafter, plan=None, **kwargs):
        if plan is not None and plan.budget == 48:
            raise MemoryError("no room for this cell")
        return real(start, drafter, plan, **kwargs)

    monkeypatch.setattr(cell, "decode", failing)
    state = pipeline(str(study_config), return_state=True)
    assert state.is_failed()
    rows = samples(workspace)
    assert len(rows) == 28
    failed = [r for r in rows if r["status"] == "failed"]
    assert len(failed) == 2 * 2 * 2
    assert all("no room for this cell" in r["error"] and r["accepted"] is None for r in failed)
    damaged = next((workspace / "results" / "rounds").rglob("part-*.parquet"))
    lost = {(r["context"], r["doc_id"]) for r in pq.ParquetFile(damaged).read().to_pylist()}
    damaged.write_bytes(b"")
    reports = list((workspace / "reports").rglob("report.html"))
    assert len(reports) == 1 and "no room for this cell" in reports[0].read_text()
    monkeypatch.setattr(cell, "decode", real)
    assert pipeline(str(study_config), return_state=True).is_completed()
    again = samples(workspace)
    assert len(again) == 28 and {r["status"] for r in again} == {"ok"}
    # Cells that did not fail are kept as they were measured, seconds and all; so are their rounds.
    kept = [r for r in rows if r["status"] == "ok" and (r["context"], r["doc_id"]) not in lost]
    assert all(r in again for r in kept)
    rounds = rows_of(workspace, "results/rounds")
    assert len(rounds) == sum(r["rounds"] for r in again)


def test_each_stage_runs_alone_and_makes_what_it_needs(workspace, study_config):
    trained = training(str(study_config))
    assert not trained.reused
    measured = evaluation(str(study_config), limit=1)
    assert measured.rows == 14


def test_mlflow_has_one_parent_with_a_child_per_stage_and_method(finished, study_config):
    client = MlflowClient(f"sqlite:///{finished / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("budgetdraft")
    runs = client.search_runs([experiment.experiment_id])
    parents = [r for r in runs if "mlflow.parentRunId" not in r.data.tags]
    assert [r.info.run_name for r in parents] == ["tiny"]
    children = {r.info.run_name: r for r in runs if r.data.tags.get("mlflow.parentRunId") == parents[0].info.run_id}
    names = {
        "tiny: targets",
        "tiny: base drafter",
        "tiny: budgetdraft drafter",
        "tiny: grid ar",
        "tiny: grid sd_full",
        "tiny: grid sd_sparse",
        "tiny: grid budgetdraft",
    }
    assert set(children) == names
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert parents[0].data.params["key.targets"] and parents[0].data.params["grid.new_tokens"] == "12"
    losses = client.get_metric_history(children["tiny: budgetdraft drafter"].info.run_id, "train/view_sparse/loss")
    assert sorted(m.step for m in losses) == [1, 2, 3, 4]
    grid = children["tiny: grid budgetdraft"].info.run_id
    curves = [client.get_metric_history(grid, f"acceptance/context_128{full}_gamma_3") for full in ("", "_full")]
    assert [sorted(m.step for m in curve) for curve in curves] == [[32, 48], [128]]
    report = [a.path for a in client.list_artifacts(parents[0].info.run_id, "report")]
    assert "report/report.html" in report
    checkpoint = [
        a.path for a in client.list_artifacts(children["tiny: budgetdraft drafter"].info.run_id, "checkpoint")
    ]
    assert "checkpoint/model.safetensors" in checkpoint


def test_a_second_run_records_nothing_twice(used, study_config):
    client = MlflowClient(f"sqlite:///{used / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("budgetdraft")
    before = len(client.search_runs([experiment.experiment_id]))
    pipeline(str(study_config))
    assert len(client.search_runs([experiment.experiment_id])) == before


def test_the_tables_answer_sql(finished):
    columns, rows = query(finished, "select method, sum(n) from cells group by method order by method")
    assert columns[0] == "method"
    assert dict(rows)["budgetdraft"] == 2 * 2 * 3
    assert query(finished, "select count(*) from targets")[1] == [(6,)]


def readme_queries():
    text = (REPOSITORY / "README.md").read_text()
    block = re.search(r"```sql\n(.*?)```", text, re.S).group(1)
    return [q for q in re.sub(r"--[^\n]*", "", block).split(";") if q.strip()]


@pytest.mark.parametrize("sql", readme_queries())
def test_the_queries_of_the_readme_answer(finished, sql):
    columns, rows = query(finished, sql)
    assert len(columns) >= 4 and rows
    assert any(row[0] == "budgetdraft" for row in rows)


def test_plain_duckdb_opens_the_views_from_any_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with duckdb.connect() as connection:
        connection.execute((finished / "views.sql").read_text())
        assert connection.sql("select count(*) from samples").fetchall() == [(28,)]


def test_the_report_is_one_file_with_figures_and_the_facts_of_the_study(finished, study_config):
    study = open_study(str(study_config))
    html = (finished / "reports" / study.keys.run / "report.html").read_text()
    assert html.count("<svg") >= 4
    assert study.keys.trained in html and study.keys.targets in html
    assert not re.search(r"(src|href)=[\"']https?:", html)


REPLAY = ["grid.workloads=[replay]", "grid.policy=[attention_mass, sink_recent]", "grid.far_window=32"]


def test_a_replay_is_measured_resumed_by_document_and_reported(used, study_config):
    pipeline(str(study_config), REPLAY)
    rows = samples(used, workload="replay")
    # per context: sd_full, sd_sparse at 2 budgets x 2 policies, budgetdraft at those and full; 2 contexts, 2 documents
    assert len(rows) == (1 + 4 + 5) * 2 * 2 and {row["status"] for row in rows} == {"ok"}
    assert all(row["rounds"] == 32 and row["drafted"] == 96 and row["far_rounds"] is not None for row in rows)
    assert all(row["exact_match"] is None and row["decode_s"] is None for row in rows)
    files = sorted((used / "results" / "samples").rglob("part-replay-*.parquet"))
    files[0].unlink()
    lost = {files[0], *(used / "results" / "rounds").rglob(files[0].name)}  # what was lost, and the rounds made with it
    kept = {p: t for p, t in times(used, "part-*.parquet").items() if p not in lost}
    pipeline(str(study_config), REPLAY)
    assert {p: t for p, t in times(used, "part-*.parquet").items() if p not in lost} == kept
    again = samples(used, workload="replay")
    assert sorted(map(str, again)) == sorted(map(str, rows))
    assert any("replay" in p.read_text() for p in (used / "reports").rglob("report.html"))


def test_an_overlay_trains_its_own_drafter_and_reuses_the_rest(used, study_config, tmp_path):
    overlay = study_config.with_name("over.yaml")
    overlay.write_text(f"extends: {study_config.name}\nname: over\ntraining: {{lam: 0, supervise: dense}}\n")
    made = training(str(overlay))
    assert not made.reused
    base, other = (open_study(str(path)).keys for path in (study_config, overlay))
    assert (base.targets, base.base) == (other.targets, other.base) and base.trained != other.trained
    assert len(list((used / "drafters").glob("*/manifest.json"))) == 3


def test_a_tied_pretrained_drafter_with_dropout_is_pruned_trained_and_loaded(workspace, study_config, tmp_path):
    own = tmp_path / "own"
    tiny_llama(vocab=260, tie_word_embeddings=True, attention_dropout=0.1).save_pretrained(own)
    byte_tokenizer().save_pretrained(own)
    made = training(str(study_config), ["base=null", f"drafter={{kind: pretrained, source: {own}, vocab_size: 64}}"])
    facts = read_facts(made.path)
    assert (facts["kind"], len(facts["head_ids"]), facts["skipped_steps"]) == ("pretrained", 64, 0)
    drafter = load_drafter(made.path, verifier_vocab=260, dtype=torch.float32, device="cpu")
    assert drafter.ids.tolist() == facts["head_ids"] and drafter.model.lm_head.out_features == 64
