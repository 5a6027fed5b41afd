"""Training in two processes (gloo): the same step as one process with twice the batch, and no rank that waits."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from bdcore.schema import TARGETS, write_rows
from bdcore.targets.rows import TargetRows
from bdcore.training import processes
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Interrupted, Stage, train
from bdcore.training.losses import IGNORE
from bdcore.training.processes import train_together
from tests.unit.training_helpers import forced_row, fresh_drafter, stage


def write_targets(folder: Path, rows: list[dict]) -> Path:
    more = {"source": "test", "offset": 0, "truncated": False}
    write_rows(folder / "part-forced-00000.parquet", [{**row, **more} for row in rows], TARGETS, row_group_size=1)
    return folder


def stage_of(folder: Path, targets: Path, **changes) -> Stage:
    settings = {"steps": 4, "validation": {"sequences": 1, "every": 2}, "supervise": "dense", **changes}
    config = stage(**settings)
    return Stage(fresh_drafter(), TargetRows(targets), config, 3, "float32", Checkpoints(folder / "checkpoint.pt"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Of five sequences three have nothing to learn: in some steps one rank has tokens and the other has none."""
    rows = [forced_row(doc) for doc in range(6)]
    for row in rows[:3]:
        row["target_ids"] = [IGNORE] * len(row["target_ids"])
    return write_targets(tmp_path_factory.mktemp("targets"), rows)


@pytest.mark.timeout(180)
def test_two_processes_take_the_steps_of_one_with_twice_the_batch(tmp_path, targets):
    alone = stage_of(tmp_path / "one", targets, batch_size=2)
    one = train(alone)
    together, told = stage_of(tmp_path / "two", targets, processes=2), []
    two = train_together(together, targets, told.append)
    assert told == json.loads(json.dumps(two.log)) and len(told) == 4
    assert sum(not r["skipped"] for r in one.log) >= 2
    for mine, theirs in zip(told, one.log, strict=True):
        assert mine["tokens"] == theirs["tokens"] and mine["views"].keys() == theirs["views"].keys()
        for name in ("loss_a", "loss_c", "grad_norm", "score"):
            a, b = mine.get(name), theirs.get(name)
            assert a is b is None or a == pytest.approx(b, rel=1e-4)
    other = dict(alone.drafter.model.named_parameters())
    for name, p in together.drafter.model.named_parameters():
        torch.testing.assert_close(p, other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.timeout(180)
def test_failing_process_ends_all_and_its_error_is_told(tmp_path, targets):
    broken = stage_of(tmp_path, targets, processes=2)
    broken.checkpoints.state.write_bytes(b"no checkpoint")
    with pytest.raises(RuntimeError, match=r"2 training processes ended with 1.*delete it to train anew"):
        train_together(broken, targets)


@pytest.mark.timeout(240)
def test_killed_launcher_takes_its_processes_with_it_and_a_new_one_goes_on(tmp_path, targets):
    code = (
        "import os, sys; from pathlib import Path; from tests.unit.test_processes import stage_of, train_together; "
        "stage = stage_of(Path(sys.argv[1]), Path(sys.argv[2]), processes=2, checkpoint_every=1); "
        "train_together(stage, Path(sys.argv[2]), lambda r: r['step'] == 2 and os.kill(os.getpid(), 9))"
    )
    root = Path(__file__).parents[2]
    where = {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}  # their command lines name this folder
    command = [sys.executable, "-c", code, str(tmp_path), str(targets)]
    assert subprocess.run(command, cwd=root, env={**os.environ, **where}).returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while left := [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]:
        assert time.monotonic() < end, left
        time.sleep(0.2)
    assert 2 <= torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] <= 4
    assert train_together(stage_of(tmp_path, targets, processes=2), targets).step == 4


@pytest.mark.parametrize(("threads", "expected"), [(3, "3"), (None, "4")])
def test_each_process_has_the_threads_that_are_configured_or_its_share_of_the_cores(
    tmp_path, targets, monkeypatch, threads, expected
):
    class Started(Exception):
        pass

    def start(command, **how):
        assert how["env"]["OMP_NUM_THREADS"] == expected
        raise Started

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    with pytest.raises(Started):
        train_together(replace(stage_of(tmp_path, targets, processes=2), threads=threads), targets)


LONGER_THAN_TORCHRUN_WAITS = 33


def held_up(seconds: float):
    """Hold every training process where it is: whatever step it is in lasts that much longer."""
    found = [p for p in psutil.Process().children(recursive=True) if "torch.distributed.run" not in p.cmdline()]
    workers = [p for p in found if "bdcore.training.processes" in p.cmdline()]
    for worker in workers:
        worker.suspend()
    threading.Timer(seconds, lambda: [worker.resume() for worker in workers if worker.is_running()]).start()
    return workers


@pytest.mark.timeout(300)
def test_sigterm_waits_for_a_long_step_saves_it_and_says_so(tmp_path, targets):
    held = []

    def stop(record):
        if record["step"] == 1:
            held.extend(held_up(LONGER_THAN_TORCHRUN_WAITS))
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient supervisor

    settings = {"steps": 80, "processes": 2, "checkpoint_every": 1000, "validation": {"sequences": 1, "every": 1000}}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        train_together(stage_of(tmp_path, targets, **settings), targets, stop)
    assert len(held) == 2 and signal.getsignal(signal.SIGTERM) is before
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"]
    assert 1 <= saved < 80 and f"step {saved} of 80 is saved" in str(caught.value)
    assert not list(tmp_path.glob(".*.partial"))
    assert train_together(stage_of(tmp_path, targets, **settings), targets).step == 80


@pytest.mark.timeout(180)
def test_sigterm_before_anything_is_saved_does_not_say_that_it_was(tmp_path, targets, monkeypatch):
    """Processes that do not finish their step: as if torchrun had waited for nothing."""
    monkeypatch.setattr(processes, "_LONGEST_STEP_S", 0)

    def stop(record):
        held_up(5)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="before anything was saved; run the same command to begin again"):
        train_together(stage_of(tmp_path, targets, steps=80, processes=2, checkpoint_every=1000), targets, stop)
