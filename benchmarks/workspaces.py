"""Workspaces of a benchmark: results of their own, beside models, targets and drafters that are made once."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHARED = ("models", "targets", "drafters")


def linked(folder: Path, root: Path, names: Sequence[str] = SHARED) -> Path:
    """A new workspace that has these folders in common with `root`; what it makes of their kind lands there."""
    folder.mkdir(parents=True)
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(root / name)
    return folder


def run_stage(workspace: Path, config: Path | str, stage: str, changes: Sequence[str]) -> None:
    """`budgetdraft run` in a process of its own; what it says goes to stderr."""
    command = [sys.executable, "-P", "-c", "from flows.cli import main; main()", "run", str(config), "--stage", stage]
    environment = {**os.environ, "BUDGETDRAFT_HOME": str(workspace)}
    subprocess.run([*command, *settings(changes)], env=environment, check=True, stdout=sys.stderr)


def settings(changes: Sequence[str]) -> list[str]:
    """`KEY=VALUE` as the command line takes them."""
    return [word for change in changes for word in ("--set", change)]
