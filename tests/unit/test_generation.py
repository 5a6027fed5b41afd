"""`budgetdraft generate` with a drafter: every option decodes, and the figures say what happened."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.tiny import write_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return str(write_study(tmp_path_factory.mktemp("study")))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--budget", "full"], "equal to the verifier alone"),
        (["--budget", "64KiB", "--gamma-mode", "adaptive"], "equal to the verifier alone"),
        (["--budget", "32", "--set", "grid.policy=oracle", "--set", "grid.refresh=2"], "equal to the verifier alone"),
        (["--budget", "32", "--set", "grid.policy=retrieval"], "equal to the verifier alone"),
        (["--repetition-penalty", "1.3", "--min-new-tokens", "12"], "equal to the verifier alone"),
        (["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--seed", "3"], "sampled from the verifier's own"),
    ],
)
def test_generate_with_a_drafter_reports_acceptance_and_equality(study, monkeypatch, tmp_path, options, says):
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path))
    twin = str(Path(study).parent / "verifier")  # drafts what it would say itself
    given = ["generate", "def add(a, b):", "--config", study, "--drafter", twin, "--new-tokens", "12", *options]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert says in text and "12 new (length)" in text and "tokens per round" in text
    assert "acceptance 100.0%" in text or "full" not in options
