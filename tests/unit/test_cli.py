"""The console script: quick help, mistakes in one line, a plan that writes nothing, read-only queries."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import flows.generation  # noqa: F401  before the guards below: it must not keep a refusing loader
from bdcore.models import loading
from flows.cli import _cells, app
from tests.tiny import write_study
from tests.unit.test_reports import sample, store

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "configs" / "quick.yaml")
COMMANDS = ["run", "plan", "generate", "query", "report", "export", "envelope", "doctor"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    before = dict(os.environ)
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield tmp_path / "home"
    for name in os.environ.keys() - before.keys():  # what `doctor` sets for Prefect is for its own process
        del os.environ[name]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return str(write_study(tmp_path_factory.mktemp("study")))


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def refusal(home, *arguments: str, code: int = 2) -> str:
    """The one line on stderr; nothing on stdout, nothing written, no traceback."""
    result = call(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    assert result.stdout == "" and result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    assert not home.exists()
    return result.stderr


def test_help_of_every_command_works_and_is_quick_for_it_imports_nothing_heavy(tmp_path):
    code = f"""
import json, sys
from typer.testing import CliRunner
from flows.cli import app
texts = {{name: CliRunner().invoke(app, [*name.split(), "--help"]) for name in ["", *{COMMANDS!r}]}}
heavy = [m for m in ("torch", "transformers", "prefect", "mlflow", "duckdb", "matplotlib", "scipy") if m in sys.modules]
print(json.dumps([heavy, {{name: [r.exit_code, r.output] for name, r in texts.items()}}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    heavy, texts = json.loads(done.stdout)
    assert heavy == []
    assert all(code == 0 and "--help" in text for code, text in texts.values())
    assert all(command in texts[""][1] for command in COMMANDS) and "BUDGETDRAFT_HOME" in texts[""][1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["run", "plan", "report"])
def test_unknown_key_is_one_line_with_the_legal_keys(home, command):
    text = refusal(home, command, QUICK, "--set", "grid.budgetz=[64]")
    assert "grid.budgetz" in text and "legal keys" in text and "budgets" in text


def test_budget_that_is_no_multiple_of_the_chunk_names_its_neighbours(home):
    text = refusal(home, "run", QUICK, "--set", "grid.budgets=[250]")
    assert "budget = 250" in text and "248" in text and "256" in text


def test_brackets_in_a_message_are_shown_and_not_read_as_markup(home, tmp_path):
    assert "budgets = [full]" in refusal(home, "plan", QUICK, "--set", "grid.budgets=[full]")
    assert "[/red] [bold] :x:.yaml" in refusal(home, "plan", str(tmp_path / "[/red] [bold] :x:.yaml"))


@pytest.mark.parametrize("command", ["run", "plan", "report"])
def test_missing_configuration_is_one_line_that_names_the_file(home, command):
    assert "nowhere.yaml" in refusal(home, command, "nowhere.yaml")


def test_unknown_stage_names_the_stages(home):
    text = refusal(home, "run", QUICK, "--stage", "tragets")
    assert "tragets" in text and "targets" in text and "evaluation" in text


def test_fault_that_needs_the_documents_is_one_line_before_anything_starts(home, study):
    assert "100 documents" in refusal(home, "run", study, "--set", "targets.forced=100")
    assert "limit = 0" in refusal(home, "run", study, "--limit", "0")


def test_cuda_that_is_not_there_is_one_line(home, study, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "runtime.device = cuda" in refusal(home, "run", study, "--set", "runtime.device=cuda")


# generate


@pytest.mark.parametrize("drafter", ["trained", "base"])
def test_generate_without_the_drafter_says_how_to_make_it(home, study, drafter):
    text = refusal(home, "generate", "hello", "--config", study, "--drafter", drafter)
    assert f"--drafter {drafter}" in text and "budgetdraft run" in text


def test_generate_with_a_folder_that_is_no_drafter_names_it(home, study, tmp_path):
    assert str(tmp_path / "x") in refusal(
        home, "generate", "hello", "--config", study, "--drafter", str(tmp_path / "x")
    )


@pytest.mark.parametrize("budget", ["250", "many", "4"])
def test_generate_with_an_illegal_budget_names_it(home, study, budget):
    text = refusal(home, "generate", "hello", "--config", study, "--budget", budget, "--drafter", "none")
    assert "budget" in text and budget in text


def test_generate_wants_exactly_one_prompt(home, study, tmp_path):
    assert "--file" in refusal(home, "generate", "--config", study)
    assert "--file" in refusal(home, "generate", "text", "--file", "x", "--config", study)
    assert "no such file" in refusal(home, "generate", "--file", str(tmp_path / "x"), "--config", study)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "utf-8" in refusal(home, "generate", "--file", str(tmp_path / "binary"), "--config", study)


@pytest.mark.parametrize("text", ["", "x" * 500])
def test_generate_with_a_prompt_that_is_empty_or_too_long_says_so(home, study, text):
    assert "the prompt" in refusal(home, "generate", text, "--config", study, "--drafter", "none")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--temperature", "-1", "temperature = -1.0: legal is 0"),
        ("--top-p", "0", "top_p = 0.0: legal is above 0"),
        ("--gamma-mode", "clever", "gamma_mode = 'clever': legal are fixed, confidence, adaptive"),
        ("--budget", "8XB", "--budget 8XB: give a number of keys"),
        ("--budget", "1KiB", "grid.budget_bytes = 1024: holds"),
    ],
)
def test_generate_with_an_illegal_option_names_it_and_what_is_legal(home, study, option, value, says):
    assert says in refusal(home, "generate", "hello", "--config", study, "--drafter", "none", option, value)


# plan


def test_plan_names_cells_keys_memory_and_time_and_writes_nothing(home):
    result = call("plan", QUICK)
    assert result.exit_code == 0 and not home.exists()
    lines = result.stdout.splitlines()
    for stage in ("targets", "base", "trained", "run"):
        (line,) = [text for text in lines if text.startswith(f"  {stage} ") and "to do" in text]
        key = line.split()[1]
        assert len(key) == 12 and int(key, 16) >= 0
    text = result.stdout
    config = yaml.safe_load(Path(QUICK).read_text())["grid"]
    assert f"contexts {', '.join(map(str, config['contexts']))};" in text
    rows = {words[1]: words[2:] for words in map(str.split, lines) if words[:1] == ["greedy"]}
    assert rows["ar"] == ["1"] and rows["sd_full"] == ["1", "B", "full", "gamma", "3"]
    assert rows["budgetdraft"][:3] == ["3", "B", "64,256,full"]
    assert "estimated memory" in text and "GiB" in text and "B = 64:" in text and "MiB" in text
    assert "estimated time" in text and "together" in text and "evaluation" in text


def test_plan_counts_what_overrides_and_limit_leave(home, study):
    result = call("plan", study, "--limit", "1", "--set", "grid.contexts=[64]", "--set", "grid.methods=[ar, sd_full]")
    assert result.exit_code == 0 and "grid: 2 cells, 2 samples of 12 tokens" in result.stdout


def test_plan_names_the_sparse_cache_of_a_verifier_that_drafts_for_itself(home, study):
    def plan(methods):
        result = call("plan", study, "--set", f"grid.methods=[{methods}]", "--set", "grid.contexts=[64]")
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    plain, lines = plan("ar, sd_full"), plan("ar, sd_full, hf_assisted, triforce")
    rows = {words[1]: words[2:] for words in map(str.split, lines) if words[:1] == ["greedy"]}
    assert rows["hf_assisted"] == ["1", "B", "full", "gamma", "3"] and rows["triforce"][:3] == ["2", "B", "32,48"]
    own = "  verifier's cache at B = 32, where it drafts for itself: "
    assert [line.startswith(own) for line in lines].count(True) == 1
    assert not any("drafts for itself" in line for line in plain)


def test_plan_tells_what_a_cache_takes_whose_budget_bounds_what_is_read_alone(home, study):
    settings = [
        "grid.policy=[sink_recent, retrieval]",
        "grid.contexts=[64]",
        "grid.budgets=[32]",
        "grid.methods=[ar, sd_sparse]",
    ]
    lines = call("plan", study, *(word for one in settings for word in ("--set", one))).stdout.splitlines()
    found = {
        line.split(" at ")[1].split(": ")[0]: float(line.split()[-2]) for line in lines if "drafter's cache" in line
    }
    assert found.keys() == {"B = 32", "B = 32, every key stored"}
    assert found["B = 32, every key stored"] > 3 * found["B = 32"]


def test_plan_of_the_same_study_names_the_same_keys(home, study):
    assert call("plan", study).stdout == call("plan", study).stdout


def test_plan_sees_what_is_done(home, study):
    from bdcore.identity import write_manifest

    lines = call("plan", study).stdout.splitlines()
    key = next(line for line in lines if line.startswith("  targets ")).split()[1]
    folder = home / "targets" / key
    folder.mkdir(parents=True)
    assert call("plan", study).stdout.count("to do") == 4
    (folder / "part.parquet").write_bytes(b"1")
    assert "started" in call("plan", study).stdout
    write_manifest(folder, key)
    assert "done" in call("plan", study).stdout


# query


def test_query_without_results_says_what_to_do(home):
    assert "budgetdraft run" in refusal(home, "query", "select 1")


@pytest.fixture
def results(home):
    text = "a[i] = b[/x]; [bold]c[/bold] :smile:"
    store(home, [sample(method="ar", doc=0), sample(doc=0, output_text=text, accepted_at=[3, 2])])
    return text


@pytest.mark.parametrize(
    "sql",
    [
        "drop view samples",
        "create table t as select 1",
        "copy samples to 'stolen.csv'",
        "insert into samples select * from samples",
        "delete from samples",
        "select 1; drop view samples",
        "selec 1",
        "select nothing from samples",
        "",
    ],
)
def test_query_refuses_writes_and_mistakes_in_one_line(home, results, tmp_path, monkeypatch, sql):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = call("query", sql)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_query_prints_rows_as_a_table_and_as_json(home, results):
    result = call("query", "select method, drafted, drafter_key, accepted_at from samples order by method")
    assert result.exit_code == 0 and "budgetdraft" in result.stdout and "NULL" in result.stdout
    assert "[3, 2]" in result.stdout
    rows = json.loads(call("query", "select method, drafted from samples order by method", "--json").stdout)
    assert rows == [{"method": "ar", "drafted": 0}, {"method": "budgetdraft", "drafted": 40}]


def test_query_shows_texts_as_they_are(home, results):
    assert results in call("query", "select output_text from samples where drafted > 0").stdout


# export and envelope


def test_export_before_training_names_the_command_and_writes_nothing(home, study, tmp_path):
    text = refusal(home, "export", study, "--to", str(tmp_path / "out"))
    assert f"budgetdraft run {study} --stage training" in text and not (tmp_path / "out").exists()


def test_envelope_writes_what_it_lists(home, results, tmp_path):
    result = call("envelope", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    listed = [Path(line) for line in result.stdout.splitlines()]
    assert sorted(listed) == sorted((tmp_path / "out").iterdir())
    assert {"envelope.csv", "compare.csv", "retention.csv"} <= {path.name for path in listed}


def test_envelope_reads_the_workspace_it_is_given(home, tmp_path):
    store(tmp_path / "other", [sample(doc=0)])
    result = call("envelope", "--out", str(tmp_path / "out"), "--workspace", str(tmp_path / "other"))
    assert result.exit_code == 0 and (tmp_path / "out" / "envelope.csv").is_file() and not home.exists()


def test_envelope_without_results_or_with_half_a_question_is_one_line(home, tmp_path):
    out = str(tmp_path / "out")
    assert "budgetdraft run" in refusal(home, "envelope", "--out", out)
    assert "--reference" in refusal(home, "envelope", "--out", out, "--drafter", "multi")
    assert "--drafter" in refusal(home, "envelope", "--out", out, "--reference", "base")


def test_envelope_with_an_unknown_drafter_names_those_there_are(home, results, tmp_path):
    result = call("envelope", "--out", str(tmp_path / "out"), "--against", "bsae")
    assert result.exit_code == 2 and "drafter = bsae: no rows of it; found 0123456789ab" in result.stderr
    assert not (tmp_path / "out").exists()


# doctor


def test_doctor_names_a_faulty_setting_and_its_remedy(home, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:./mlruns")
    (tmp_path / "broken[a].yaml").write_text("grid: {budgets: [250]}")
    result = call("doctor", str(tmp_path / "broken[a].yaml"))
    assert result.exit_code == 1
    assert "FAIL MLflow" in result.stdout and "sqlite" in result.stdout and "MLFLOW_TRACKING_URI" in result.stdout
    assert "FAIL broken[a].yaml" in result.stdout and "248" in result.stdout and "->" in result.stdout
    assert f"workspace {home}: writable" in result.stdout


def test_doctor_reports_a_workspace_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "x.yaml").write_text("gird: 1")
    result = call("doctor", str(tmp_path / "x.yaml"))
    assert result.exit_code == 1 and "BUDGETDRAFT_HOME" in result.stdout and "Traceback" not in result.output


def test_the_table_of_cells_names_the_setting_where_the_grid_has_several():
    row = dict.fromkeys(("acceptance", "lo", "hi", "tokens_per_round", "decode_speedup")) | {
        "method": "ngram", "context": 512, "budget": -1, "gamma": 1, "exact": "0/0", "failed": 0
    }  # fmt: skip
    plain = _cells("s", [row | {"setting": ""}])
    told = _cells("s", [row | {"setting": name} for name in ("pg19", "stdlib")])
    assert [c.header for c in plain.columns][:2] == ["method", "context"]
    assert [c.header for c in told.columns][:3] == ["method", "setting", "context"]
    assert list(told.columns[1].cells) == ["pg19", "stdlib"]
