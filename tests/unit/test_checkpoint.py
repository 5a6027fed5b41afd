"""Resume: 5 + 5 steps in a new process are 10 steps, bit for bit; a damaged checkpoint is a named error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bdcore.models.drafter import load_drafter, save_drafter
from bdcore.targets.rows import TargetRows
from bdcore.training import checkpoint
from bdcore.training.checkpoint import Checkpoints, TrainingState
from bdcore.training.loop import Stage, train
from tests.unit.training_helpers import fresh_drafter, rows, stage

CONFIG = stage(
    mixture={"forced": 0.7, "repeated": 0.3}, batch_size=2, loss_a={"ce": 0.5, "kl": 0.5}, views={"policy": "random"}
)
"""A random budget, a random prefix, a random kind and a random policy in every step."""


class Killed(BaseException):
    pass


def trained(path: Path, stop_after: int | None = None):
    """(log, weights) of the ten steps; `stop_after` dies like a killed process, after the step was told."""
    drafter = fresh_drafter()

    def on_step(record):
        if record["step"] == stop_after:
            raise Killed

    stage_of = Stage(drafter, TargetRows.of(rows()), CONFIG, 5, "float32", Checkpoints(path))
    log = train(stage_of, on_step).log
    return log, {name: p.detach() for name, p in drafter.model.named_parameters()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole") / "checkpoint.pt")


def assert_same(one, other):
    assert one[0] == other[0]  # budgets, prefixes, rates, losses, agreement: every figure of the log
    assert one[1].keys() == other[1].keys() and all(torch.equal(p, other[1][n]) for n, p in one[1].items())


@pytest.mark.parametrize("killed_at", [6, 8])
def test_killed_run_goes_on_from_its_checkpoint_and_ends_bit_equal(tmp_path, uninterrupted, killed_at):
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(Killed):
        trained(path, stop_after=killed_at)
    assert torch.load(path, weights_only=True)["step"] == 5
    assert_same(trained(path), uninterrupted)


def test_new_process_goes_on_bit_equal(tmp_path, uninterrupted):
    path, out = tmp_path / "checkpoint.pt", tmp_path / "ended.pt"
    with pytest.raises(Killed):
        trained(path, stop_after=6)
    code = (
        "import sys, torch; from pathlib import Path; from tests.unit.test_checkpoint import trained; "
        "torch.save(trained(Path(sys.argv[1])), sys.argv[2])"
    )
    root = Path(__file__).parents[2]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, path, out],
        cwd=tmp_path,
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(out, weights_only=True), uninterrupted)


def test_finished_checkpoint_trains_no_further(tmp_path, uninterrupted):
    path = tmp_path / "checkpoint.pt"
    trained(path)
    assert_same(trained(path, stop_after=10), uninterrupted)


def pair():
    drafter = fresh_drafter()
    return drafter.model, torch.optim.AdamW(drafter.model.parameters(), lr=1e-3)


def test_absent_checkpoint_is_none(tmp_path):
    assert checkpoint.load(tmp_path / "none.pt", *pair()) is None


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "pickle"])
def test_damaged_checkpoint_is_an_error_that_names_the_file_and_what_to_do(tmp_path, damage):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, TrainingState(1, []), *pair())
    whole = path.read_bytes()
    content = {"empty": b"", "cut": whole[: len(whole) // 2], "text": b"no weights\n" * 9}
    if damage == "pickle":
        torch.save({"step": pytest.raises}, path)  # code, which is never run
    else:
        path.write_bytes(content[damage])
    model, optimizer = pair()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as caught:
        checkpoint.load(path, model, optimizer)
    text = str(caught.value)
    assert str(path) in text and "delete it" in text and "\n" not in text
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("content", [{}, {"step": 1, "log": [], "weights": {"other": 1}, "optimizer": {}}, [1, 2]])
def test_checkpoint_of_something_else_is_an_error_that_names_the_file(tmp_path, content):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(RuntimeError, match=r"checkpoint\.pt.*delete it"):
        checkpoint.load(path, *pair())


def test_failed_save_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, TrainingState(1, []), *pair())
    whole = path.read_bytes()

    def full_disk(content, partial):
        partial.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError):
        checkpoint.save(path, TrainingState(2, []), *pair())
    assert path.read_bytes() == whole and [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_half_written_checkpoints_of_killed_runs_are_removed_and_nothing_else(tmp_path):
    found, other = Checkpoints(tmp_path / ".key[1].checkpoint.pt"), Checkpoints(tmp_path / ".key[2].checkpoint.pt")
    for checkpoints in (found, other):
        model, optimizer = pair()
        checkpoint.save(checkpoints.state, TrainingState(1, []), model, optimizer)
        checkpoint.save_weights(checkpoints.best, model)
    whole = {p.name for p in tmp_path.iterdir()}
    for path, pid in ((found.state, 1), (found.best, os.getpid()), (other.state, 2)):
        path.with_name(f".{path.name}.{pid}.partial").write_bytes(b"half")
    found.remove_partials()
    assert {p.name for p in tmp_path.iterdir()} == whole | {"..key[2].checkpoint.pt.2.partial"}
    assert checkpoint.load(found.state, *pair()).step == 1
    found.remove()
    assert {p.name for p in tmp_path.iterdir()} == {n for n in whole if "[2]" in n} | {
        "..key[2].checkpoint.pt.2.partial"
    }


# B33: tied embeddings.

LOAD = """
import sys, torch
from bdcore.models.drafter import load_drafter
drafter = load_drafter(sys.argv[1], verifier_vocab=128, dtype=torch.float32, device="cpu")
print(drafter.model.lm_head.weight is drafter.model.model.embed_tokens.weight)
with torch.inference_mode():
    torch.save(drafter.model(torch.arange(64)[None], use_cache=False).logits, sys.argv[2])
"""


def tied_stage(path: Path, tied: bool, steps: int = 1) -> Stage:
    """A stage of a `pretrained` drafter; untied: loaded from a tied checkpoint whose config says so no more."""
    path.mkdir(exist_ok=True)
    drafter = fresh_drafter(tie_word_embeddings=True)
    if not tied:
        drafter.model.config.tie_word_embeddings = False
        drafter.model.lm_head.weight = torch.nn.Parameter(drafter.model.lm_head.weight.detach().clone())
    config = stage(steps=steps, warmup=0, learning_rate=1e-2)
    rows_of = TargetRows.of(rows())
    return Stage(drafter, rows_of, config, 5, "float32", Checkpoints(path / "c.pt"), freeze_embedding=False)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_drafter_trains_is_saved_and_loaded_tied_and_an_untied_one_is_not(tmp_path, tied):
    found = tied_stage(tmp_path / "work", tied)
    model = found.drafter.model
    before = model.lm_head.weight.detach().clone()
    (record,) = train(found).log
    assert not record["skipped"] and not torch.equal(model.lm_head.weight, before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    save_drafter(found.drafter, tmp_path / "saved", tokenizer=None, facts={})
    command = [sys.executable, "-c", LOAD, tmp_path / "saved", tmp_path / "logits.pt"]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True)
    assert done.stdout.split() == [str(tied)], done.stderr
    again = load_drafter(str(tmp_path / "saved"), verifier_vocab=128, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        mine, theirs = (d.model(torch.arange(64)[None], use_cache=False).logits for d in (found.drafter, again))
    assert torch.equal(mine, theirs) and torch.equal(mine, torch.load(tmp_path / "logits.pt"))


def test_tied_drafter_goes_on_bit_equal_and_its_checkpoint_holds_the_shared_weight_once(tmp_path):
    whole = tied_stage(tmp_path / "whole", True, steps=7)
    log = train(whole).log

    def die(record):
        if record["step"] == 6:
            raise Killed

    with pytest.raises(Killed):
        train(tied_stage(tmp_path / "cut", True, steps=7), die)
    content = torch.load(tmp_path / "cut" / "c.pt", weights_only=True)
    assert content["step"] == 5 and "lm_head.weight" not in content["weights"]
    cut = tied_stage(tmp_path / "cut", True, steps=7)
    assert train(cut).log == log
    assert torch.equal(cut.drafter.model.lm_head.weight, whole.drafter.model.lm_head.weight)
