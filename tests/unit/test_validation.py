"""What a validation judges: every held-out row once, the same text for every stage and seed."""

from bdcore.targets.rows import TargetRows
from bdcore.training import loop
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Stage, train
from bdcore.training.validation import held_out_batches, judged
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
