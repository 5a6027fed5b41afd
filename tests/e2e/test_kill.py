"""kill -9 at any stage, then the same command: finished work is reused, nothing is doubled, the result is the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from bdcore.study import open_study
from tests.tiny import write_study

COMMAND = [str(Path(sys.executable).parent / "budgetdraft"), "run"]
# What does not depend on the clock.
COLUMNS = ["cell_key", "doc_id", "method", "context", "budget", "output_ids", "drafted", "accepted", "exact_match"]


def start(study: Path, home: Path) -> subprocess.Popen:
    environment = {**os.environ, "BUDGETDRAFT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment.pop("PREFECT_API_URL", None)
    with (home.parent / f"{home.name}.log").open("a") as out:
        return subprocess.Popen([*COMMAND, str(study)], env=environment, stdout=out, stderr=out, start_new_session=True)


def kill_when(process: subprocess.Popen, appears) -> bool:
    """SIGKILL the whole group as soon as `appears()`; False when the run ended before."""
    while process.poll() is None:
        if appears():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.02)
    return False


def long_enough_to_be_killed(study: Path) -> None:
    """More steps for both training stages, so that each still has some to go when its first checkpoint is seen."""
    config = yaml.safe_load(study.read_text())
    for name in ("base", "training"):
        config[name] |= {"steps": 40, "checkpoint_every": 4}
    study.write_text(yaml.safe_dump(config))


def result(home: Path, key: str) -> list[tuple]:
    files = sorted((home / "results" / "samples" / f"run_key={key}").glob("part-*.parquet"))
    rows = [r for p in files for r in pq.ParquetFile(p).read(COLUMNS).to_pylist()]
    return sorted((tuple(str(r[c]) for c in COLUMNS)) for r in rows)


@pytest.mark.slow
def test_a_run_killed_in_every_stage_ends_like_an_uninterrupted_one(tmp_path, monkeypatch):
    study = write_study(tmp_path / "study")
    long_enough_to_be_killed(study)
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for home in (clean, killed):
        home.mkdir()
    assert start(study, clean).wait(600) == 0, (tmp_path / "clean.log").read_text()
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(killed))
    opened = open_study(str(study))
    keys, workspace = opened.keys, opened.workspace
    made = (keys.base, keys.trained)
    stages = {
        "targets": lambda: any(workspace.targets(keys.targets).glob("part-*.parquet")),
        "base": lambda: workspace.drafter(keys.base).with_name(f".{keys.base}.checkpoint.pt").exists(),
        "trained": lambda: workspace.drafter(keys.trained).with_name(f".{keys.trained}.checkpoint.pt").exists(),
        "grid": lambda: any(workspace.samples(keys.run).glob("part-*.parquet")),
    }
    hit = [name for name, appears in stages.items() if kill_when(start(study, killed), appears)]
    for key in made:  # what a kill while saving leaves, which cannot be timed
        workspace.drafter(key).with_name(f"..{key}.checkpoint.pt.1.partial").write_bytes(b"half")
    assert start(study, killed).wait(600) == 0, (tmp_path / "killed.log").read_text()
    assert hit == list(stages), f"killed only in {hit}"
    assert result(killed, keys.run) == result(clean, keys.run)
    assert len(result(killed, keys.run)) == 28
    for key in made:
        mine, theirs = (load_file(home / "drafters" / key / "model.safetensors") for home in (killed, clean))
        assert all((mine[name] == theirs[name]).all() for name in theirs)
    assert not [p.name for p in (killed / "drafters").iterdir() if ".checkpoint" in p.name]
