"""What is recorded of each stage, from its finished artifact: parameters, curves, files. Knows no MLflow but `Run`."""

import json
import re
from pathlib import Path
from typing import Any

from bdcore.evaluation.grid import REPLAY
from bdcore.identity import MANIFEST, read_manifest
from bdcore.schema import FULL_BUDGET
from bdcore.study import Study
from reports.measured import summary_rows
from tasks.progress import ArtifactRef, OnRecord
from tasks.tracking import Point, Run, Tracker, never_fatal


def live_recorder(run: Run) -> OnRecord:
    """Logs training records in batches while they come."""
    waiting: list[dict[str, Any]] = []

    def record(entry: dict[str, Any]) -> None:
        waiting.append(entry)
        if len(waiting) >= 10:
            if run.metrics(training_points(waiting)):  # else they are logged with the finished drafter
                run.logged_steps |= {e["step"] for e in waiting}
            waiting.clear()

    return record


def training_points(records: list[dict[str, Any]]) -> list[Point]:
    """Loss and agreement curves by view and by budget, and validation agreement by view."""
    points: list[Point] = []
    for r in records:
        step = r["step"]
        points.append(("train/learning_rate", r["learning_rate"], step))
        for view, branch in (("view_full", "a"), ("view_sparse", "c")):
            if r[f"loss_{branch}"] is not None:
                points.append((f"train/{view}/loss", r[f"loss_{branch}"], step))
                points.append((f"train/{view}/agreement", r[f"agree_{branch}"], step))
        for view, part in r["views"].items():
            if part["loss"] is not None:
                points.append((f"train/{view}/loss", part["loss"], step))
                points.append((f"train/{view}/agreement", part["agreement"], step))
        for kind in ("agreement", "decoded"):
            points += [(f"valid/{kind}/{view}", share, step) for view, share in r.get(kind, {}).items()]
    return points


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    """Nested settings as `section.field` parameters."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for name, inner in value.items() for k, v in _flat(f"{prefix}.{name}", inner).items()}


@never_fatal
def record_pipeline(run: Run, study: Study) -> None:
    settings = study.config.model_dump(mode="json")
    run.params({k: v for name, value in settings.items() for k, v in _flat(name, value).items()})
    run.params({f"key.{name}": key for name, key in study.keys.facts().items()})
    run.params({f"runtime.{name}": value for name, value in study.runtime.facts().items()})


@never_fatal
def record_targets(run: Run, study: Study, targets: ArtifactRef) -> None:
    manifest = read_manifest(Path(targets.path)) or {}
    run.params({"key": targets.key, **_flat("targets", manifest.get("config"))})
    rates = [(f"targets/{mode}_tokens_per_s", manifest[f"{mode}_tokens_per_s"], 0) for mode in ("forced", "generated")]
    # Undefined where an earlier run, or none, made them.
    run.metrics([("targets/rows", manifest["rows"], 0), *(point for point in rates if point[1] is not None)])
    run.artifacts(Path(targets.path) / MANIFEST)


@never_fatal
def record_drafter(run: Run, study: Study, drafter: ArtifactRef) -> None:
    """Settings, the curves that were not logged live, and the checkpoint folder."""
    directory = Path(drafter.path)
    manifest = read_manifest(directory) or {}
    wanted = ("kind", "stage", "layers", "verifier", "targets", "base", "trained_tokens", "source")
    run.params({"key": drafter.key, **{k: manifest[k] for k in wanted if k in manifest}})
    run.params(_flat("training", manifest.get("training") or {}))
    log = json.loads((directory / "training_log.json").read_text())
    run.metrics(training_points([r for r in log if r["step"] not in run.logged_steps]))
    run.artifacts(directory, "checkpoint")


@never_fatal
def record_grid(tracker: Tracker, study: Study, *, parent: str | None, failed: int) -> None:
    """One child run per method and drafter: curves over budget (`step`: budget; a full cache has a `_full` one)."""
    series: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in summary_rows(study.workspace.root, study.keys.run):
        series.setdefault((row["method"], row["drafter_name"]), []).append(row)
    for (method, drafter), rows in series.items():
        name = f"{method} {drafter}" if drafter in study.config.grid.drafters else method
        key = f"{study.keys.run}/{name}"
        if parent is None and tracker.finished("grid", key):
            continue
        with tracker.run("grid", f"grid {name}", key, parent=parent) as run:
            facts = {"method": method, "drafter": rows[0]["drafter_key"], "drafter_role": drafter}
            facts |= {"run_key": study.keys.run}
            # All at once: each call is a transaction, which costs more than what it writes.
            run.params(facts | _flat("grid", study.config.grid.model_dump(mode="json")))
            run.metrics(_grid_points(rows))
            run.tag("failed_samples", str(failed))


def _grid_points(rows: list[dict[str, Any]]) -> list[Point]:
    points: list[Point] = []
    for row in rows:
        full = row["budget"] == FULL_BUDGET
        # Metrics of their own: at the step of its context a full cache would fall upon a budget of that many keys.
        step = row["context"] if full else row["budget"]
        suffix = f"context_{row['context']}" + ("_full" if full else "")
        suffix += f"_gamma_{row['gamma']}" if row["gamma"] else ""
        if row["setting"]:  # corpus, workload, policy and the like, as far as the run has several
            suffix += "_" + re.sub(r"\W+", "_", row["setting"])
        for name in ("acceptance", "tokens_per_round", "decode_speedup"):
            measured = row["gamma"] and not (name == "decode_speedup" and row["workload"] == REPLAY)
            if row[name] is not None or measured:  # what was measured and is undefined is worth a tag
                points.append((f"{name}/{suffix}", row[name], step))
    return points


@never_fatal
def record_report(run: Run, report: ArtifactRef) -> None:
    run.artifacts(Path(report.path), "report")
