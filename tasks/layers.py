"""Which of the verifier's layers a sliced drafter gets: configured ones, or measured ones."""

import json
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from bdcore.identity import digest, exclusive, write_json
from bdcore.models.heads import LayerScore, choose_layers
from bdcore.models.removal import removals
from bdcore.study import Study
from bdcore.targets.rows import TargetRows
from bdcore.training.batches import passages, split_validation
from tasks.progress import Progress

PASSAGES, TOKENS = 6, 256
"""Training texts on which removals are judged."""


def chosen_layers(study: Study, model: Any, scores: list[LayerScore], targets: Path) -> list[int]:
    """The verifier's layers of the drafter, ascending."""
    config = study.config.drafter
    if config.layers:
        layers, why = config.layers, "configured"
    elif config.choose == "copying":
        layers, why = choose_layers(scores, config.num_layers), "by measured copying scores"
    else:
        layers, why = _closest(study, model, targets), "the rest is closest to the verifier"
    get_run_logger().info("base drafter: verifier layers %s (%s)", layers, why)
    return layers


def _closest(study: Study, model: Any, targets: Path) -> list[int]:
    """What is left after enough removals. They are kept as they are found: a killed run goes on, and a study of another
    number of layers on the same targets begins with them.
    """
    total, wanted = len(model.model.layers), study.config.drafter.num_layers
    stages = [stage for stage in (study.config.base, study.config.training) if stage]
    held_out = max(stage.validation.sequences for stage in stages)
    path = study.workspace.removals(digest(study.keys.targets, held_out, PASSAGES, TOKENS))
    with exclusive(path):
        found: list[dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else []
        if len(found) < total - wanted:
            rows = TargetRows(targets)
            kept, _ = split_validation(rows, held_out)
            ids_BT = passages(rows, kept, count=PASSAGES, length=TOKENS).to(model.device)
            progress = Progress("layers", "layers to spare", total - wanted, "removals", done=len(found))
            for removal in removals(model, ids_BT, [f["layer"] for f in found]):
                write_json(path, found := [*found, vars(removal)])
                progress(len(found), f"without {removal.layer}: {removal.divergence:.2f} nats from the verifier")
                if len(found) == total - wanted:
                    break
    gone = {f["layer"] for f in found[: total - wanted]}
    return [layer for layer in range(total) if layer not in gone]
