"""A study opened for work: its configuration, workspace, runtime, documents and keys."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from bdcore.config import Config, load_config
from bdcore.identity import digest
from bdcore.keys import Keys, study_keys
from bdcore.preflight import Inputs, inputs, with_budgets
from bdcore.runtime import Runtime, resolve
from bdcore.workspace import Workspace, default_root, locate_config


@dataclass(frozen=True)
class Study:
    config: Config
    workspace: Workspace
    runtime: Runtime
    inputs: Inputs
    keys: Keys

    @property
    def key(self) -> str:
        """Identity of the whole study: what the pipeline's MLflow run is found by."""
        return digest(self.config, self.keys.facts())


def open_study(config: str, overrides: list[str] | None = None, limit: int | None = None) -> Study:
    """Read and check a study: every error that needs no model is raised here, before anything is written."""
    loaded = load_config(locate_config(config), overrides, limit=limit)
    runtime = resolve(loaded.runtime)
    loaded = with_budgets(loaded, runtime)
    found = inputs(loaded)
    return Study(loaded, Workspace(default_root()), runtime, found, study_keys(loaded, runtime, found))


_open: dict[tuple[str, tuple[str, ...], int | None], Study] = {}


@contextmanager
def study_for(config: str, overrides: list[str] | None = None, limit: int | None = None) -> Generator[Study]:
    """The study, read once for a pipeline and the stages inside it, and forgotten when the outermost ends."""
    key = (str(locate_config(config)), tuple(overrides or ()), limit)
    if key in _open:
        yield _open[key]
        return
    _open[key] = open_study(config, overrides, limit)
    try:
        yield _open[key]
    finally:
        del _open[key]
