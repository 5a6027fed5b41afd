"""How drafters grew: what each validation of each training stage found, against the tokens learned from until then."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bdcore.identity import read_manifest

GROWTH = ("study", "stage", "seed", "drafter_key", "step", "tokens", "measure", "view", "share")


def growth(workspace: Path) -> list[dict[str, Any]]:
    """One row of `GROWTH` per validation, measure (`agreement`, `decoded`) and view, over all finished drafters.

    `tokens`: supervised tokens of both losses, of this stage alone.
    """
    rows: list[dict[str, Any]] = []
    for folder in sorted((workspace / "drafters").glob("*")):
        manifest, log = read_manifest(folder), folder / "training_log.json"
        if manifest is not None and log.is_file():
            facts = {
                "study": manifest.get("study"),
                "stage": manifest.get("stage"),
                "seed": (manifest.get("training") or {}).get("seed"),
                "drafter_key": manifest["key"],
            }
            rows += [{**facts, **row} for row in validations(json.loads(log.read_text()))]
    return sorted(rows, key=lambda row: [str(row["study"]), str(row["stage"]), row["drafter_key"], row["step"]])


def validations(log: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the records of a training log that hold a validation found, in their order."""
    tokens = 0
    for record in log:
        tokens += record["tokens"]
        for measure in ("agreement", "decoded"):
            for view, share in record.get(measure, {}).items():
                yield {"step": record["step"], "tokens": tokens, "measure": measure, "view": view, "share": share}
