"""Stage 4: the collapse report of a grid."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from bdcore.config import Config, DrafterConfig, GridConfig, ModelConfig
from bdcore.documents import Document
from bdcore.evaluation.grid import cells, context_facts
from bdcore.identity import digest, exclusive, file_digest, read_manifest, write_manifest
from bdcore.runtime import environment
from bdcore.study import Study
from reports.build import build_report
from reports.deployment import as_json, as_text, recommended
from reports.tables import write_views
from tasks.progress import ArtifactRef, announce
from tasks.texts import text_facts
from tasks.training import LOG


@task(cache_policy=NO_CACHE)
def report_grid(study: Study) -> ArtifactRef:
    """HTML, Markdown, CSV and figures of everything measured so far, and `views.sql` for the workspace."""
    workspace, run_key = study.workspace, study.keys.run
    directory = workspace.report(run_key)
    key = report_key(study)
    with exclusive(directory):
        write_views(workspace.root)
        manifest = read_manifest(directory)
        if manifest is not None and manifest["key"] != key:
            manifest = None
        announce("report", directory, manifest)
        reused = manifest is not None
        if not reused:
            paths = build_report(workspace.root, run_key, directory, facts=report_facts(study))
            write_manifest(directory, key, stage="report", inputs={"run": run_key})
            _publish(paths["report.md"])
    return ArtifactRef(str(directory), key, 0, reused)


@task(cache_policy=NO_CACHE)
def recommend_setting(study: Study, *, context: int, memory: int, batch: int = 1) -> dict[str, Any]:
    """What to deploy at a context, as `budgetdraft recommend` says it, from this study's rows; also as an artifact."""
    found = recommended(study.workspace.root, context=context, memory=memory, batch=batch, run_key=study.keys.run)
    create_markdown_artifact(as_text(found), key="recommendation", description=f"{context} tokens, batch {batch}")
    return json.loads(as_json(found))


def report_key(study: Study) -> str:
    """Changes with the rows, with what is said about them, and with the code that says it: verdicts and pages."""
    rows = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(study.workspace.samples(study.keys.run).glob("*.parquet"))
    ]
    root = Path(__file__).parent.parent
    files = sorted(p for package in ("reports", "bdcore/collapse") for p in (root / package).rglob("*"))
    code = [(p.name, file_digest(p)) for p in files if p.suffix in (".py", ".j2", ".csv")]
    return digest("report", study.keys.facts(), rows, text_facts(study), code)


def report_facts(study: Study) -> dict[str, Any]:
    """What the report says about how its rows came to be."""
    config, workspace, keys = study.config, study.workspace, study.keys
    drafters = {"base": keys.base, "trained": keys.trained}
    return {
        "study": config.name,
        "expected_samples": context_facts(config.grid)["samples"],
        "planned": planned(config.grid),
        "paper": papers_pair(config),
        "texts": text_facts(study),
        "answers": answers(study.inputs.evaluation),
        "runtime": study.runtime.facts(),
        "environment": environment(),
        "keys": keys.facts(),
        "drafters": {role: _made(workspace.drafter(key)) for role, key in drafters.items()},
        "targets": _made(workspace.targets(keys.targets)),
        "training": {role: _log(workspace.drafter(key)) for role, key in drafters.items()},
        "config": config.model_dump(mode="json"),
    }


def planned(grid: GridConfig) -> list[dict[str, Any]]:
    """The cells of the grid on each of its corpora, with their number of prompts."""
    return [
        {**asdict(cell), "drafter_name": cell.drafter, "corpus": corpus.label, "prompts": grid.prompts}
        for corpus in grid.corpus
        for cell in cells(grid)
    ]


def answers(documents: Iterable[Document]) -> dict[str, str]:
    """Document -> the number of the needle that it asks for."""
    return {d.doc_id: d.evidence.answer for d in documents if d.evidence}


def papers_pair(config: Config) -> bool:
    """Whether verifier and drafter are the paper's, which are the defaults."""
    return (config.verifier, config.drafter) == (ModelConfig(), DrafterConfig())


def _made(directory: Path) -> dict[str, Any]:
    manifest = read_manifest(directory) or {}
    return {k: v for k, v in manifest.items() if k not in ("files", "environment", "training", "config")}


def _log(directory: Path) -> list[dict[str, Any]]:
    path = directory / LOG
    return json.loads(path.read_text()) if path.is_file() else []


def _publish(markdown: Path) -> None:
    try:
        create_markdown_artifact(markdown.read_text(), key="collapse-report")
    except Exception as error:  # the UI's copy must never cost the report
        get_run_logger().warning("report artifact: %s", error)
