"""`budgetdraft doctor`: checks of the environment, the models and the workspace, each with what to do."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from bdcore.config import Config, ConfigError, load_config
from bdcore.identity import read_manifest
from bdcore.workspace import Workspace, locate_config


@dataclass(frozen=True)
class Finding:
    ok: bool
    what: str
    remedy: str = ""


def examine(config: str, workspace: Workspace) -> Iterator[Finding]:
    """Every check, the quick ones first."""
    yield _packages()
    yield _machine()
    yield _folder(workspace)
    yield from _artifacts(workspace)
    yield from _tracking(workspace)
    try:
        loaded = load_config(locate_config(config))
    except ConfigError as error:
        yield Finding(False, str(error), "correct the configuration")
        return
    yield from _study(loaded, workspace)


def _packages() -> Finding:
    wrong = list[str]()
    for line in requires("budgetdraft") or []:
        need = Requirement(line)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(need.name)
        except PackageNotFoundError:
            wrong.append(f"{need} is missing")
            continue
        if not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} {have} is not {need.specifier}")
    if wrong:
        return Finding(False, "packages: " + "; ".join(wrong), "run `make setup`")
    return Finding(True, f"packages: torch {version('torch')}, transformers {version('transformers')}, as pinned")


def _machine() -> Finding:
    memory, cores = psutil.virtual_memory().total / 2**30, len(os.sched_getaffinity(0))
    text = f"machine: {cores} cores, {memory:.1f} GiB of memory"
    return Finding(True, text, "" if memory >= 7.5 else "the quick study wants 8 GiB; with less it may be killed")


def _folder(workspace: Workspace) -> Finding:
    root = workspace.root
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            free = shutil.disk_usage(root).free / 2**30
    except OSError as error:
        return Finding(
            False, f"workspace {root}: {error.strerror}", "set BUDGETDRAFT_HOME to a folder you may write to"
        )
    ok = free >= 4
    return Finding(ok, f"workspace {root}: writable, {free:.0f} GiB free", "" if ok else "free at least 4 GiB")


def _artifacts(workspace: Workspace) -> Iterator[Finding]:
    for kind in ("targets", "drafters", "results/samples"):
        folders = [p for p in sorted((workspace.root / kind).glob("[!.]*")) if p.is_dir()]
        done = sum(read_manifest(p) is not None for p in folders)
        rest = len(folders) - done
        remedy = "run the same command again to go on" if rest else ""
        yield Finding(True, f"{kind}: {done} finished" + (f", {rest} unfinished" if rest else ""), remedy)


def _tracking(workspace: Workspace) -> Iterator[Finding]:
    from tasks.tracking import tracking_uri

    try:
        yield Finding(True, f"MLflow: {tracking_uri(workspace)}")
    except ValueError as error:
        yield Finding(False, f"MLflow: {error}", "change MLFLOW_TRACKING_URI")


def _study(config: Config, workspace: Workspace) -> Iterator[Finding]:
    from bdcore.models.loading import EMBEDDED, load_tokenizer, materialise, quiet
    from bdcore.preflight import inputs
    from bdcore.runtime import resolve

    def runtime() -> str:
        return f"runtime: {resolve(config.runtime).reason}"

    def documents() -> str:
        found = inputs(config)
        return f"documents: {len(found.training)} for training, {len(found.evaluation)} for evaluation"

    def verifier() -> str:
        with quiet():
            source = materialise(config.verifier, workspace.models)
            vocabulary = len(load_tokenizer(source, config.verifier.revision))
        where = f" (converted in {Path(source)})" if config.verifier.source == EMBEDDED else ""
        return f"verifier {config.verifier.source}: {vocabulary} ids{where}"

    for check in (runtime, documents, verifier):
        yield _attempt(check)


def _attempt(check: Callable[[], str]) -> Finding:
    try:
        return Finding(True, check())
    except (ConfigError, OSError, ValueError) as error:
        return Finding(False, " ".join(str(error).split()), "see the message")
