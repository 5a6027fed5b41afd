"""Checkpoints of a training stage: weights, optimizer, step and log, written atomically and read without pickled code.

The random choices of a step are functions of (seed, step), so the step is all there is to restore of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bdcore.identity import atomic_path


@dataclass
class TrainingState:
    step: int
    """Steps done."""
    log: list[dict[str, Any]]


def save(path: Path, state: TrainingState, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    content = {"step": state.step, "log": state.log, "weights": trained, "optimizer": optimizer.state_dict()}
    with atomic_path(path) as partial:
        torch.save(content, partial)


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState | None:
    """Restore model and optimizer in place; None when there is no checkpoint. A damaged one is a RuntimeError."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        state = TrainingState(content["step"], content["log"])
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in content["weights"].items():
                parameters[name].copy_(value)
        optimizer.load_state_dict(content["optimizer"])
    except Exception as error:  # torch raises many kinds for a damaged file, and another model's does not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise RuntimeError(f"checkpoint {path} cannot be read ({reason}); delete it to train anew") from error
    return state
