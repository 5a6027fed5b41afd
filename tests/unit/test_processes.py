"""Training in two processes (gloo): the same step as one process with twice the batch, and no rank that waits."""

import json
from pathlib import Path

import pytest
import torch

from bdcore.schema import TARGETS, write_rows
from bdcore.targets.rows import TargetRows
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Stage, train
from bdcore.training.losses import IGNORE
from bdcore.training.processes import train_together
from tests.unit.training_helpers import forced_row, fresh_drafter, stage


def write_targets(folder: Path, rows: list[dict]) -> Path:
    more = {"source": "test", "offset": 0, "truncated": False}
    write_rows(folder / "part-forced-00000.parquet", [{**row, **more} for row in rows], TARGETS, row_group_size=1)
    return folder


def stage_of(folder: Path, targets: Path, **changes) -> Stage:
    config = stage(steps=4, validation={"sequences": 1, "every": 2}, supervise="dense", **changes)
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
