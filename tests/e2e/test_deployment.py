"""The documented path: `make serve`, `make deploy`, `prefect deployment run`, on a free loopback port."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from bdcore.workspace import REPOSITORY
from reports.tables import query
from tests.tiny import write_study

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def served(tmp_path):
    """`make serve` in a process group of its own; yields the environment of its clients."""
    port, log = free_port(), tmp_path / "serve.log"
    api = f"http://127.0.0.1:{port}/api"
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment = {
        **quiet,
        "BUDGETDRAFT_HOME": str(tmp_path / "workspace"),
        "PREFECT_HOME": str(tmp_path / "workspace" / "prefect"),
        "PREFECT_API_URL": api,
        "DO_NOT_TRACK": "1",
    }
    command = ["make", "-C", str(REPOSITORY), "serve", f"PORT={port}"]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait_for(f"{api}/health", server, log)
        yield environment, port, log
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise AssertionError(f"no server after 180 s: {log.read_text()}")


@pytest.mark.server
def test_a_deployment_runs_in_a_worker_and_leaves_rows(served, tmp_path):
    environment, port, log = served
    study = write_study(tmp_path / "study")

    def client(*command: str) -> subprocess.CompletedProcess:
        # Run from elsewhere: nothing may depend on the current folder.
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )

    deployed = client("make", "-C", str(REPOSITORY), "deploy", f"PORT={port}")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    listed = client(str(BIN / "prefect"), "deployment", "ls")
    wanted = ["pipeline/quick", "pipeline/cpu", "pipeline/paper", *(f"{s}/quick" for s in _STAGES)]
    # A name may be broken over lines of a table: look at what the server says without its frame.
    assert all(name.split("/")[0] in listed.stdout for name in wanted), listed.stdout
    ran = client(
        *(str(BIN / "prefect"), "deployment", "run", "pipeline/quick", "--param", f"config={study}"),
        *("--watch", "--watch-timeout", "500"),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr + log.read_text()
    _, rows = query(tmp_path / "workspace", "select count(*), count(*) filter (exact_match) from samples")
    assert rows == [(28, 28)]


_STAGES = ("targets", "training", "evaluation", "reporting")
