"""What a long task says of itself."""

import logging

import pytest

import tasks.progress as module
from tasks.progress import Progress


@pytest.fixture
def said(monkeypatch, caplog):
    clock = iter([100.0, 120.0, 140.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("task"))
    monkeypatch.setattr(Progress, "_publish", lambda *_: None)
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize(
    ("done", "steps", "told"),
    [(0, 5, "5/100 steps (4.0 s each, 6:20 min left)"), (10, 90, "90/100 steps (4.0/s, 0:02 min left)")],
)
def test_the_rate_reads_well_fast_or_slow_and_counts_only_what_was_done_here(said, done, steps, told):
    progress = Progress("key", "fit", 100, "steps", done=done)
    progress(steps)
    assert said.messages[-1] == f"fit: {told}"


def test_the_last_unit_has_nothing_left(said):
    Progress("key", "fit", 100, "steps", since=80.0)(100, "done well")
    assert said.messages == ["fit: 100/100 steps (5.0/s); done well"]
