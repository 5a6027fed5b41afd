"""Best and last weights of a finished stage: both are kept, and either can be had as a drafter's folder."""

import pytest
import torch

from bdcore.models.drafter import load_drafter, save_drafter
from bdcore.targets.rows import TargetRows
from bdcore.training import loop
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Stage, train
from bdcore.training.weights import OTHER, keep_other, kept_step, step_of, weights_of
from tests.unit.training_helpers import fresh_drafter, rows, stage


def made(folder, monkeypatch, keep, scores):
    """A stage of 6 steps, validated at every second with these scores: (its folder, facts, weights by step)."""
    left, drafter, seen = iter(scores), fresh_drafter(), {}
    monkeypatch.setattr(loop, "validate", lambda *_, **__: {"agreement": {"full": next(left)}})
    config = stage(steps=6, validation={"sequences": 1, "every": 2, "keep": keep})
    found = Checkpoints(folder / "checkpoint.pt")

    def on_step(record):
        seen[record["step"]] = {name: p.detach().clone() for name, p in drafter.model.named_parameters()}

    state = train(Stage(drafter, TargetRows.of(rows()), config, 3, "float32", found), on_step)
    facts = {"training": config.model_dump(mode="json"), "steps": state.step, "best_step": state.best_step or None}
    save_drafter(drafter, folder / "out", tokenizer=None, facts=facts)
    keep_other(found, config, state, folder / "out")
    return folder / "out", facts, seen


@pytest.mark.parametrize("keep", ["best", "last"])
def test_either_set_of_weights_is_a_folder_whichever_became_the_drafter(tmp_path, monkeypatch, keep):
    out, facts, seen = made(tmp_path, monkeypatch, keep, [0.1, 0.4, 0.3])
    assert (step_of(facts, "best"), step_of(facts, "last")) == (4, 6) and (out / OTHER).is_file()
    assert step_of(facts, None) == kept_step(facts) == {"best": 4, "last": 6}[keep]
    for step in (4, 6):
        with weights_of(out, step, 128) as folder:
            assert (folder == out) is (step == kept_step(facts))
            found = load_drafter(str(folder), verifier_vocab=128, dtype=torch.float32, device="cpu")
        assert all(torch.equal(p, seen[step][name]) for name, p in found.model.named_parameters())
        assert folder == out or not folder.exists()


def test_a_last_step_that_validated_best_leaves_one_set(tmp_path, monkeypatch):
    out, facts, _ = made(tmp_path, monkeypatch, "best", [0.1, 0.2, 0.3])
    assert {step_of(facts, which) for which in (None, "best", "last")} == {6} and not (out / OTHER).exists()


def test_lost_weights_are_named(tmp_path, monkeypatch):
    out, *_ = made(tmp_path, monkeypatch, "last", [0.1, 0.4, 0.3])
    (out / OTHER).unlink()
    with pytest.raises(FileNotFoundError, match=r"other_weights\.pt: the weights of step 4 are not there"):  # noqa: SIM117
        with weights_of(out, 4, 128):
            pass
