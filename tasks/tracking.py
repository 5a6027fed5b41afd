"""MLflow: one run per pipeline, children for targets, each drafter and each method. The only module that knows it.

Everything is logged from finished artifacts, so a reused stage is tracked like a new one; training also logs live.
A tracking fault is a warning and a tag, never the end of a run.
"""

import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param, RunStatus
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from prefect.logging import get_logger

from bdcore.identity import digest
from bdcore.study import Study
from bdcore.workspace import Workspace

Point = tuple[str, float | None, int]
"""(metric, value, step)"""
P, T = ParamSpec("P"), TypeVar("T")
_LONGEST_PARAM = 6000
_KEY_TAG, _ROLE_TAG = "budgetdraft.key", "budgetdraft.role"
logger = get_logger("tracking")


def tracking_uri(workspace: Workspace) -> str:
    """`MLFLOW_TRACKING_URI`, else an absolute sqlite database in the workspace."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{workspace.root / 'mlflow.db'}"
    # A bare path such as `mlruns` is a file store too; `databricks` and `uc` are servers without a scheme.
    local = urlsplit(uri).scheme in ("", "file") and not uri.startswith(("databricks", "uc"))
    if local and not os.environ.get("MLFLOW_ALLOW_FILE_STORE"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI = {uri}: MLflow 3 refuses its file store; use sqlite:////absolute/path/mlflow.db, "
            "a server's address, or set MLFLOW_ALLOW_FILE_STORE=true"
        )
    return uri


def never_fatal(function: Callable[P, T]) -> Callable[P, T | None]:
    """Retry once; then warn and go on without: results matter more than their record."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        for last in (False, True):
            try:
                return function(*args, **kwargs)
            except Exception as error:  # whatever MLflow, its database or its server raises
                if last:
                    logger.warning("MLflow: %s failed (%s); going on without it", function.__name__, _brief(error))
                else:
                    time.sleep(1)
        return None

    return guarded


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def clean_name(name: str) -> str:
    """A legal metric or parameter name; names that differ stay different."""
    cleaned = re.sub(r"[^\w\-. /]", "_", name)
    return name if cleaned == name else f"{cleaned}-{digest(name, length=4)}"


@dataclass
class Run:
    """One MLflow run that is being written. Does nothing when tracking is off or has failed."""

    client: MlflowClient | None
    run_id: str | None
    logged_steps: set[int] = field(default_factory=set)
    """Training steps that were logged live."""

    @never_fatal
    def params(self, values: Mapping[str, Any]) -> None:
        """Parameters; what is too long goes to an artifact, its hash stays."""
        if self.client is None or self.run_id is None:
            return
        short: list[Param] = []
        for name, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            if len(text) > _LONGEST_PARAM:
                self.client.log_text(self.run_id, text, f"params/{clean_name(name)}.txt")
                text = f"see artifact params/{clean_name(name)}.txt, hash {digest(text)}"
            short.append(Param(clean_name(name), text))
        for start in range(0, len(short), 100):
            self._params_batch(short[start : start + 100])

    def _params_batch(self, batch: list[Param]) -> None:
        assert self.client is not None and self.run_id is not None
        try:
            self.client.log_batch(self.run_id, params=batch)
        except MlflowException:  # a value differs from an earlier one: that one stays, the new one is a tag
            for param in batch:
                try:
                    self.client.log_param(self.run_id, param.key, param.value)
                except MlflowException:
                    self.client.set_tag(self.run_id, f"changed.{param.key}", param.value[:5000])

    @never_fatal
    def metrics(self, points: list[Point]) -> bool:
        """Log (name, value, step) points; True when done. Undefined values are tagged, never logged as numbers."""
        if self.client is None or self.run_id is None:
            return False
        now = int(time.time() * 1000)
        defined: list[Metric] = []
        for name, value, step in points:
            if value is None or value != value or abs(value) == float("inf"):
                self.client.set_tag(self.run_id, f"undefined.{clean_name(name)}", f"step {step}")
            else:
                defined.append(Metric(clean_name(name), float(value), now, step))
        for start in range(0, len(defined), 1000):
            self.client.log_batch(self.run_id, metrics=defined[start : start + 1000])
        return True

    @never_fatal
    def artifacts(self, path: Path, folder: str | None = None) -> None:
        if self.client is None or self.run_id is None:
            return
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        log(self.run_id, str(path), folder)

    @never_fatal
    def tag(self, name: str, value: str) -> None:
        if self.client is not None and self.run_id is not None:
            self.client.set_tag(self.run_id, name, value)


_OFF = Run(None, None)


@dataclass(frozen=True)
class Tracker:
    """Opens runs in one experiment. `client` is None when tracking is off."""

    client: MlflowClient | None
    experiment_id: str = ""
    study: str = ""
    """Name of the study: every run bears it, since runs of several studies are compared in one list."""

    @contextmanager
    def run(self, role: str, name: str, key: str, *, parent: str | None = None) -> Iterator[Run]:
        """A run that ends FINISHED, or FAILED when the block raises. Runs an earlier process left open are closed."""
        run = self._open(role, name, key, parent) or _OFF
        try:
            yield run
        except BaseException:
            self._close(run, "FAILED")
            raise
        self._close(run, "FINISHED")

    def finished(self, role: str, key: str, parent: str | None = None) -> str | None:
        """The id of a finished run of this role and key, so that nothing is recorded twice."""
        found = self._find(role, key, "FINISHED", parent)
        return found[0] if found else None

    @never_fatal
    def _find(self, role: str, key: str, status: str, parent: str | None) -> list[str]:
        if self.client is None:
            return []
        query = f"tags.`{_ROLE_TAG}` = '{role}' and tags.`{_KEY_TAG}` = '{key}' and attributes.status = '{status}'"
        if parent:
            query += f" and tags.`mlflow.parentRunId` = '{parent}'"
        return [run.info.run_id for run in self.client.search_runs([self.experiment_id], query)]

    @never_fatal
    def _open(self, role: str, name: str, key: str, parent: str | None) -> Run:
        if self.client is None:
            return _OFF
        for left_open in self._find(role, key, "RUNNING", None) or []:
            self.client.set_terminated(left_open, "KILLED")
        tags = {_ROLE_TAG: role, _KEY_TAG: key, "mlflow.source.name": "budgetdraft", "mlflow.user": "budgetdraft"}
        if self.study:
            tags["budgetdraft.study"] = self.study
            name = name if name == self.study else f"{self.study}: {name}"
        if parent:
            tags["mlflow.parentRunId"] = parent
        created = self.client.create_run(self.experiment_id, tags=tags, run_name=name)
        return Run(self.client, created.info.run_id)

    @never_fatal
    def _close(self, run: Run, status: str) -> None:
        if self.client is None or run.run_id is None:
            return
        # A final status is never overwritten: somebody may have closed the run as KILLED.
        if self.client.get_run(run.run_id).info.status == RunStatus.to_string(RunStatus.RUNNING):
            self.client.set_terminated(run.run_id, status)


@never_fatal
def _connect(workspace: Workspace, experiment: str, study: str) -> Tracker:
    workspace.root.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(tracking_uri(workspace))
    found = client.get_experiment_by_name(experiment)
    if found is not None:
        return Tracker(client, found.experiment_id, study)
    local = None if os.environ.get("MLFLOW_TRACKING_URI") else (workspace.root / "mlartifacts").as_uri()
    return Tracker(client, client.create_experiment(experiment, artifact_location=local), study)


def connect(study: Study, *, parent: str | None = None) -> Tracker:
    """The tracker of a study: inert when tracking is off, cannot be reached, or has recorded this very study."""
    config = study.config.tracking
    tracker = (_connect(study.workspace, config.experiment, study.config.name) if config.enabled else None) or Tracker(
        None
    )
    if parent is None and tracker.finished("pipeline", study.key):
        logger.info("MLflow: this study is recorded already, in experiment %r", config.experiment)
        return Tracker(None)
    return tracker
