"""MLflow: where it writes, legal names, undefined values, long and changed parameters, and how runs end."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from bdcore.config import Config
from bdcore.workspace import Workspace
from tasks import recording, tracking
from tasks.recording import live_recorder, training_points
from tasks.tracking import Run, Tracker, clean_name, tracking_uri

NAMES = ["accept@4k", "accept[budget=256]", "time(s)/gen", "MAP@k", "x[delta=1]", "a\nb", "100%", "a:b"]


@pytest.fixture(autouse=True)
def no_setting(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setattr(tracking.time, "sleep", lambda seconds: None)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return Workspace(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def tracker(workspace):
    """One database for the module: making one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        made = tracking._connect(workspace, "tests", "")
    assert made is not None and made.client is not None
    return made


@pytest.fixture
def key(request):
    return request.node.name.replace("'", "")[:100]


def stored(tracker: Tracker, run: Run):
    return tracker.client.get_run(run.run_id)


def status(tracker: Tracker, run: Run) -> str:
    return stored(tracker, run).info.status


@pytest.fixture
def warned(caplog):
    target = getattr(tracking.logger, "logger", tracking.logger)  # Prefect's does not pass records on
    target.addHandler(caplog.handler)
    yield lambda: [m for m in map(logging.LogRecord.getMessage, caplog.records) if "MLflow" in m]
    target.removeHandler(caplog.handler)


# Where it writes.


def test_default_is_an_absolute_database_in_the_workspace(tmp_path):
    assert tracking_uri(Workspace(tmp_path)) == f"sqlite:///{tmp_path}/mlflow.db"


def test_old_mlruns_folder_in_the_current_folder_changes_nothing(tmp_path, monkeypatch, tracker, workspace):
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("name: Default\n")
    monkeypatch.chdir(tmp_path)
    again = tracking._connect(workspace, "tests", "")
    assert again.experiment_id == tracker.experiment_id and again.client.tracking_uri.endswith("mlflow.db")
    assert [p.name for p in tmp_path.iterdir()] == ["mlruns"] and not list((tmp_path / "mlruns").glob("[1-9]*"))


@pytest.mark.parametrize("uri", ["file:./mlruns", "file:///tmp/mlruns", "./mlruns", "/tmp/mlruns", "mlruns"])
def test_file_store_is_refused_with_sqlite_and_the_opt_in(monkeypatch, tmp_path, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError) as caught:
        tracking_uri(Workspace(tmp_path))
    text = str(caught.value)
    assert uri in text and "sqlite:///" in text and "MLFLOW_ALLOW_FILE_STORE" in text and "\n" not in text
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert tracking_uri(Workspace(tmp_path)) == uri


@pytest.mark.parametrize(
    "uri", ["http://host:5000", "https://host", "sqlite:////x/y.db", "databricks", "databricks://p"]
)
def test_other_addresses_are_taken_as_they_are(monkeypatch, tmp_path, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking_uri(Workspace(tmp_path)) == uri


def test_artifacts_are_found_from_any_folder(tracker, key, tmp_path, monkeypatch, workspace):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "figure.txt").write_text("42")
    monkeypatch.chdir(tmp_path / "a")
    with tracker.run("test", "artifacts", key) as run:
        run.artifacts(tmp_path / "figure.txt", "report")
        run.artifacts(tmp_path / "a", "empty")
    monkeypatch.chdir(tmp_path / "b")
    reader = MlflowClient(tracking_uri(workspace))
    local = Path(reader.download_artifacts(run.run_id, "report/figure.txt", str(tmp_path / "b")))
    assert local.read_text() == "42"
    assert stored(tracker, run).info.artifact_uri.startswith((workspace.root / "mlartifacts").as_uri())
    assert not list((tmp_path / "a").iterdir())


# Names and undefined values.


@pytest.mark.parametrize("name", NAMES)
def test_names_are_cleaned_to_what_is_legal(name):
    assert all(c.isalnum() or c in "_-./ " for c in clean_name(name)) and clean_name(name) == clean_name(name)


def test_names_that_differ_stay_different():
    names = ["a@b", "a_b", "a#b", "a[b", "a b", "a.b", "a/b", "a-b", *NAMES]
    assert len({clean_name(n) for n in names}) == len(names)
    assert clean_name("train/view_full/loss") == "train/view_full/loss"


def test_strange_names_are_logged(tracker, key):
    with tracker.run("test", "names", key) as run:
        assert run.metrics([(name, 1.0, 0) for name in NAMES])
        run.params(dict.fromkeys(NAMES, "x"))
    assert len(stored(tracker, run).data.metrics) == len(NAMES) == len(stored(tracker, run).data.params)


def test_undefined_values_are_tagged_and_never_numbers(tracker, key):
    with tracker.run("test", "undefined", key) as run:
        run.metrics(
            [("fine", 0.5, 1), ("none", None, 2), ("nan", math.nan, 3), ("inf", math.inf, 4), ("a@b", -math.inf, 5)]
        )
    data = stored(tracker, run).data
    assert data.metrics == {"fine": 0.5}
    tags = {k: v for k, v in data.tags.items() if k.startswith("undefined.")}
    assert tags["undefined.none"] == "step 2" and tags["undefined.nan"] == "step 3" and len(tags) == 4


def test_cell_without_drafted_tokens_is_tagged_and_not_found_by_a_comparison(tracker, key, monkeypatch):
    cell = {
        "drafter_name": "trained",
        "drafter_key": "t",
        "setting": "",
        "workload": "greedy",
        "budget": 64,
        "context": 512,
        "gamma": 4,
        "tokens_per_round": None,
        "decode_speedup": None,
    }
    ar = {
        "drafter_name": None,
        "drafter_key": None,
        "setting": "",
        "workload": "greedy",
        "method": "ar",
        "budget": -1,
        "context": 512,
        "gamma": 0,
        "acceptance": None,
        "decode_speedup": 1.0,
    }
    rows = [
        {**cell, "method": "sd_sparse", "acceptance": None},
        {**cell, "method": "budgetdraft", "acceptance": 0.05},
        {**ar, "tokens_per_round": None},
    ]
    monkeypatch.setattr(recording, "summary_rows", lambda root, run_key: rows)
    keys = SimpleNamespace(run=key, base="b", trained="t")
    study = SimpleNamespace(workspace=Workspace(Path("/nowhere")), keys=keys, config=Config())
    recording.record_grid(tracker, study, parent=None, failed=3)
    query = "metrics.`acceptance/context_512_gamma_4` < 0.1"
    found = tracker.client.search_runs([tracker.experiment_id], query)
    assert [run.data.params["method"] for run in found] == ["budgetdraft"]
    by_method = {
        r.data.params["method"]: r.data
        for r in tracker.client.search_runs([tracker.experiment_id], "tags.`failed_samples` = '3'")
    }
    assert "undefined.acceptance/context_512_gamma_4" in by_method["sd_sparse"].tags
    assert not [t for t in by_method["ar"].tags if t.startswith("undefined.")]


def test_a_full_cache_never_stands_in_the_curve_over_budgets():
    """A budget of as many keys as the context has tokens is a point of its own."""
    row = {"context": 512, "gamma": 4, "setting": "", "workload": "greedy", "tokens_per_round": 2.0}
    rows = [{**row, "budget": b, "acceptance": a, "decode_speedup": a} for b, a in ((64, 0.2), (512, 0.3), (-1, 0.4))]
    points = [point for point in recording._grid_points(rows) if point[0].startswith("acceptance")]
    assert points == [
        ("acceptance/context_512_gamma_4", 0.2, 64),
        ("acceptance/context_512_gamma_4", 0.3, 512),
        ("acceptance/context_512_full_gamma_4", 0.4, 512),
    ]


# Parameters.


def test_too_long_a_value_becomes_an_artifact_and_its_hash_beside_twenty_others(tracker, key, tmp_path):
    values = {f"p{i}": i for i in range(20)}
    with tracker.run("test", "long", key) as run:
        run.params({**dict(list(values.items())[:10]), "long": "x" * 7000, **dict(list(values.items())[10:])})
    params = stored(tracker, run).data.params
    assert {k: params[k] for k in values} == {k: str(v) for k, v in values.items()}
    assert "params/long.txt" in params["long"] and "hash" in params["long"]
    text = Path(tracker.client.download_artifacts(run.run_id, "params/long.txt", str(tmp_path))).read_text()
    assert text == "x" * 7000


def test_changed_parameter_keeps_its_old_value_and_the_new_one_is_a_tag(tracker, key):
    with tracker.run("test", "changed", key) as run:
        run.params({"max_steps": 100, "same": "s"})
        run.params({"max_steps": 200, "same": "s", "later": 1})
    data = stored(tracker, run).data
    assert data.params == {"max_steps": "100", "same": "s", "later": "1"}
    assert data.tags["changed.max_steps"] == "200" and "changed.same" not in data.tags


def test_more_parameters_than_fit_one_call_are_all_there(tracker, key):
    with tracker.run("test", "many", key) as run:
        run.params({f"p{i}": i for i in range(250)})
    assert len(stored(tracker, run).data.params) == 250


# How runs end.


def test_finished_block_ends_finished_and_is_found_by_role_and_key(tracker, key):
    assert tracker.finished("test", key) is None
    with tracker.run("test", "fine", key) as run:
        assert status(tracker, run) == "RUNNING" and tracker.finished("test", key) is None
    assert status(tracker, run) == "FINISHED" and tracker.finished("test", key) == run.run_id
    assert tracker.finished("other", key) is None and tracker.finished("test", "other") is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_raised_block_ends_failed_with_its_parent_and_the_next_run_starts(tracker, key, error):
    with (
        pytest.raises(error),
        tracker.run("parent", "p", key) as parent,
        tracker.run("child", "c", key, parent=parent.run_id) as child,
    ):
        raise error("cell 2")
    assert (status(tracker, parent), status(tracker, child)) == ("FAILED", "FAILED")
    assert stored(tracker, child).data.tags["mlflow.parentRunId"] == parent.run_id
    assert not tracker._find("parent", key, "RUNNING", None) and tracker.finished("parent", key) is None
    with tracker.run("parent", "p", key) as second:
        pass
    assert status(tracker, second) == "FINISHED" and second.run_id != parent.run_id


def test_run_left_by_a_killed_process_is_closed_as_killed(tracker, key):
    left = tracker._open("test", "left", key, None)
    other = tracker._open("test", "other", key + " other", None)
    with tracker.run("test", "again", key) as run:
        assert status(tracker, left) == "KILLED" and status(tracker, other) == "RUNNING"
    assert status(tracker, run) == "FINISHED" and status(tracker, left) == "KILLED"


def test_final_status_is_not_overwritten(tracker, key):
    with tracker.run("test", "closed by another", key) as run:
        tracker.client.set_terminated(run.run_id, "KILLED")
    assert status(tracker, run) == "KILLED"


# Faults.


@pytest.mark.parametrize("uri", ["sqlite:////proc/nowhere/x.db", "file:./mlruns", "nonsense://x"])
def test_broken_address_is_a_warning_and_tracking_goes_off(monkeypatch, tmp_path, warned, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = Config.model_validate({"tracking": {"experiment": "x"}})
    tracker = tracking.connect(SimpleNamespace(config=config, workspace=Workspace(tmp_path), key="k"))
    assert tracker.client is None and any("going on without it" in text for text in warned())
    with tracker.run("pipeline", "n", "k") as run:
        run.params({"a": 1}), run.tag("b", "c"), run.artifacts(tmp_path)
        assert not run.metrics([("m", 1.0, 0)])


def test_database_that_breaks_in_the_middle_never_ends_the_run(tracker, key, warned):
    class Broken:
        def __getattr__(self, name):
            raise OSError("database is locked")

    with Tracker(Broken(), "0").run("test", "n", key) as run:
        run.params({"a": 1})
    broken = Run(Broken(), "id")
    broken.params({"a": 1}), broken.metrics([("m", 1.0, 0)]), broken.tag("a", "b"), broken.artifacts(Path("/"))
    assert len(warned()) >= 5


def test_error_of_the_work_itself_is_not_swallowed_by_a_broken_tracker(key):
    with pytest.raises(ZeroDivisionError), Tracker(None).run("test", "n", key):
        raise ZeroDivisionError


def test_tracking_can_be_switched_off(tmp_path):
    config = Config.model_validate({"tracking": {"enabled": False}})
    assert tracking.connect(SimpleNamespace(config=config, workspace=Workspace(tmp_path), key="k")).client is None
    assert not list(tmp_path.iterdir())


def test_study_that_is_recorded_already_is_not_recorded_twice(tracker, workspace, key):
    config = Config.model_validate({"tracking": {"experiment": "tests"}})
    study = SimpleNamespace(config=config, workspace=workspace, key=key)
    assert tracking.connect(study).client is not None
    with tracker.run("pipeline", "first", key):
        pass
    assert tracking.connect(study).client is None
    assert tracking.connect(study, parent="some run").client is not None


# Curves.


def record(step, **changes):
    views = {"budget_64": {"loss": 2.0, "agreement": 0.25, "tokens": 8}}
    fields = {"loss_a": 1.0, "loss_c": 2.0, "agree_a": 0.5, "agree_c": 0.25, "views": views, "learning_rate": 1e-3}
    return {"step": step, **fields, **changes}


def test_curves_are_by_view_and_by_budget():
    points = training_points(
        [
            record(3, agreement={"full": 0.5, "budget_64": 0.25}, decoded={"full": 0.4}),
            record(4, loss_c=None, views={}),
        ]
    )
    assert ("train/budget_64/loss", 2.0, 3) in points and ("valid/agreement/budget_64", 0.25, 3) in points
    assert ("valid/decoded/full", 0.4, 3) in points and ("train/budget_64/agreement", 0.25, 3) in points
    assert ("valid/agreement/full", 0.5, 3) in points and ("train/view_sparse/agreement", 0.25, 3) in points
    assert {name for name, _, step in points if step == 4} == {
        "train/learning_rate",
        "train/view_full/loss",
        "train/view_full/agreement",
    }


def test_steps_that_could_not_be_logged_live_are_left_for_the_end():
    class Client:
        up = False

        def log_batch(self, run_id, metrics: list[Metric]):
            if not self.up:
                raise OSError("database is locked")

    client = Client()
    run = Run(client, "id")
    live = live_recorder(run)
    for step in range(10):
        live(record(step))
    client.up = True
    for step in range(10, 23):
        live(record(step))
    assert run.logged_steps == set(range(10, 20))
    off = Run(None, None)
    for step in range(10):
        live_recorder(off)(record(step))
    assert not off.logged_steps


def test_runs_bear_the_name_of_their_study(tracker, key):
    """In the UI runs of several studies stand in one list."""
    with replace(tracker, study="main").run("pipeline", "main", key) as parent:
        pass
    with replace(tracker, study="main").run("grid", "grid ar", key, parent=parent.run_id) as child:
        pass
    runs = [tracker.client.get_run(run.run_id) for run in (parent, child)]
    assert [r.info.run_name for r in runs] == ["main", "main: grid ar"]
    assert {r.data.tags["budgetdraft.study"] for r in runs} == {"main"}
