"""The two sets of weights that a finished stage may leave: those of its best validation, and its last ones.

`validation.keep` says which became the drafter. Where they differ, the other set lies beside it in its folder.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bdcore.config import ConfigError, TrainingConfig
from bdcore.models.drafter import load_drafter, read_facts, save_drafter
from bdcore.training import checkpoint
from bdcore.training.checkpoint import Checkpoints, TrainingState

OTHER = "other_weights.pt"


def keep_other(found: Checkpoints, config: TrainingConfig, state: TrainingState, folder: Path) -> None:
    """Store in a drafter's folder the weights of the stage that did not become the drafter, without the optimizer."""
    if state.best_step in (0, state.step):
        return
    path = found.state if config.validation.keep == "best" else found.best
    weights = torch.load(path, map_location="cpu", weights_only=True)["weights"]
    torch.save({"weights": weights}, folder / OTHER)


def kept_step(facts: Mapping[str, Any]) -> int:
    """The step whose weights are the drafter, by what its folder says of its training; 0 where it was not trained."""
    training = facts.get("training")
    best = facts.get("best_step") if training and training["validation"]["keep"] == "best" else None
    return best or facts.get("steps") or 0


def step_of(facts: Mapping[str, Any], which: str | None) -> int:
    """The step of the `best` or the `last` weights; None: of those that the study keeps. ConfigError where there is no
    validation to be the best of.
    """
    if which == "best" and not facts.get("best_step"):
        raise ConfigError(
            "--weights best: this drafter was not validated while it was trained; leave the option out, or train it "
            "with validation.sequences >= 1"
        )
    return {None: kept_step(facts), "best": facts.get("best_step"), "last": facts.get("steps")}[which] or 0


@contextmanager
def weights_of(folder: Path, step: int, verifier_vocab: int) -> Generator[Path]:
    """A drafter's folder with the weights of `step`, one of the two it has: itself, or for this block a copy."""
    facts = read_facts(str(folder))
    if step == kept_step(facts):
        yield folder
        return
    drafter = load_drafter(str(folder), verifier_vocab=verifier_vocab, dtype=torch.float32, device="cpu")
    if checkpoint.load(folder / OTHER, drafter.model) is None:
        raise FileNotFoundError(f"{folder / OTHER}: the weights of step {step} are not there; train the drafter anew")
    with TemporaryDirectory(prefix="budgetdraft-") as copy:
        save_drafter(drafter, Path(copy), tokenizer=None, facts=facts)
        yield Path(copy)
