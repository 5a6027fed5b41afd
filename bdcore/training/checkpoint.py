"""Checkpoints of a training stage: weights, optimizer, step and log, written atomically and read without pickled code.

The random choices of a step are functions of (seed, step), so the step is all there is to restore of them.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bdcore.identity import atomic_path, remove_partials


@dataclass
class TrainingState:
    step: int = 0
    """Steps done."""
    log: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    """Step of the best validation so far; 0: none yet."""
    best_score: float = float("-inf")
    stale: int = 0
    """Validations since."""


@dataclass(frozen=True)
class Checkpoints:
    """Where a stage keeps its state, and the weights of its best validation."""

    state: Path

    @property
    def best(self) -> Path:
        return self.state.with_suffix(".best.pt")

    def remove_partials(self) -> None:
        """Remove checkpoints that a killed run left half-written. Only under the lock of the stage's artifact."""
        for path in (self.state, self.best):
            remove_partials(path)

    def remove(self) -> None:
        """Remove all of it, once the drafter is there. Only under the lock of the stage's artifact."""
        self.remove_partials()
        for path in (self.state, self.best):
            path.unlink(missing_ok=True)


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What training changes, by name, on the CPU's side of the graph."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def save(path: Path, state: TrainingState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    content = {**asdict(state), "weights": trained_weights(model), "optimizer": optimizer.state_dict()}
    with atomic_path(path) as partial:
        torch.save(content, partial)


def save_weights(path: Path, model: torch.nn.Module) -> None:
    with atomic_path(path) as partial:
        torch.save({"weights": trained_weights(model)}, partial)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingState | None:
    """Restore model and optimizer in place; None when there is no checkpoint. A damaged one is a RuntimeError."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        _put(model, content.pop("weights"))
        if optimizer is not None:
            optimizer.load_state_dict(content["optimizer"])
        content.pop("optimizer", None)
        return TrainingState(**content)
    except Exception as error:  # torch raises many kinds for a damaged file, and another model's does not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RuntimeError(f"checkpoint {path} cannot be read ({reason}); delete it to train anew") from error


def _put(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)
