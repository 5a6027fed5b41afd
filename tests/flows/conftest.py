"""One Prefect server for all flow tests, and one tiny study made once and copied."""

import os

os.environ.setdefault("DO_NOT_TRACK", "1")

import pytest
from prefect.testing.utilities import prefect_test_harness

from tests.tiny import write_study


@pytest.fixture(scope="session", autouse=True)
def prefect_server():
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture(scope="session")
def study_config(tmp_path_factory):
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path / "workspace"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "workspace"
