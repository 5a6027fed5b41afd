"""What a validation judges: every held-out row once, the same text for every stage and seed."""

import pytest
import torch

from bdcore.models.drafter import Drafter
from bdcore.targets.rows import TargetRows
from bdcore.training import loop
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Stage, train
from bdcore.training.validation import held_out_batches, judged, validate
from tests.unit.training_helpers import fresh_drafter, rows, stage


def test_every_held_out_row_is_judged_once_at_its_end():
    data = rows(12)
    batches = held_out_batches(TargetRows.of(data), range(4, 12), fresh_drafter(), 40)
    assert [batch.ids_BT.tolist() for batch in batches] == [[row["prompt_ids"][-40:]] for row in data[4:]]
    assert [batch.targets.labels.tolist() for batch in batches] == [[row["target_ids"][-40:]] for row in data[4:]]


def judged_tokens(folder, monkeypatch, seed, **changes) -> list[list[int]]:
    """The newest tokens of each sequence that a stage's validation is given."""
    config, seen = stage(steps=1, validation={"sequences": 3, "every": 1}, **changes), []

    def watched(drafter, batches, *_, **__):
        seen.extend(batch.ids_BT[0, -judged(config) :].tolist() for batch in batches)
        return {"agreement": {"full": 0.5}}

    monkeypatch.setattr(loop, "validate", watched)
    checkpoints = Checkpoints(folder / f"{seed} {config.longest}.pt")
    train(Stage(fresh_drafter(), TargetRows.of(rows(8)), config, seed, "float32", checkpoints))
    return seen


def test_stages_and_seeds_are_judged_on_the_same_text(tmp_path, monkeypatch):
    found = [judged_tokens(tmp_path, monkeypatch, seed) for seed in (0, 1, 2)]
    assert found[0] == found[1] == found[2] == [row["prompt_ids"][-20:] for row in rows(8)[5:]]
    short = judged_tokens(tmp_path, monkeypatch, 3, prefix_lengths={16: 1})
    assert short == [tokens[-12:] for tokens in found[0]]


@pytest.mark.parametrize("dropped", [0, 60, 125])
def test_a_token_that_a_pruned_head_cannot_say_is_a_miss(dropped):
    """With the full cache both figures are the share of all 20 judged tokens, which the head can say or not."""
    ids = torch.arange(dropped, 128)
    model = fresh_drafter().model
    head = torch.nn.Linear(64, len(ids), bias=False)
    head.weight.data = model.lm_head.weight.data[ids]
    model.lm_head = head
    data = rows(3)
    with torch.no_grad():
        for row in data:  # what the drafter says is right at every second token
            said = ids[model(torch.tensor([row["prompt_ids"][-40:]])).logits[0].argmax(-1)].tolist()
            row["target_ids"][-40::2] = said[::2]
    config = stage(lam=0, validation={"sequences": 3, "decode_tokens": 20})
    batches = held_out_batches(TargetRows.of(data), range(3), Drafter(model, ids), 40)
    found = validate(Drafter(model, ids), batches, config, seed=0)
    assert found["agreement"]["full"] == found["decoded"]["full"] == pytest.approx(0.5, abs=0.05)
