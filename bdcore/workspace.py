"""Where artifacts lie: one folder, a sub-folder per kind, a directory per key."""

import os
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def default_root() -> Path:
    """`BUDGETDRAFT_HOME`, else `workspace/` of the checkout this code runs from, else of the current folder."""
    named = os.environ.get("BUDGETDRAFT_HOME")
    if named:
        return Path(named).expanduser().resolve()
    here = REPOSITORY if (REPOSITORY / "pyproject.toml").is_file() else Path.cwd()
    return here / "workspace"


@dataclass(frozen=True)
class Workspace:
    root: Path

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def prefect_home(self) -> Path:
        return self.root / "prefect"

    def targets(self, key: str) -> Path:
        return self.root / "targets" / key

    def drafter(self, key: str) -> Path:
        return self.root / "drafters" / key

    def samples(self, key: str) -> Path:
        return self.root / "results" / "samples" / f"run_key={key}"

    def rounds(self, key: str) -> Path:
        return self.root / "results" / "rounds" / f"run_key={key}"

    def report(self, key: str) -> Path:
        return self.root / "reports" / key


def locate_config(config: str | Path) -> Path:
    """A configuration file by path, relative to the current folder or else to the checkout (workers run elsewhere)."""
    path = Path(config).expanduser()
    if path.is_absolute() or path.is_file():
        return path.resolve()
    inside = REPOSITORY / path
    return inside if inside.is_file() else path.resolve()
