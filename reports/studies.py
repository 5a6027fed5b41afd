"""What every run in a workspace measured, document by document, under names that tell the drafters of studies apart."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bdcore.identity import MANIFEST, canonical_json, read_manifest
from bdcore.schema import SELF
from reports.series import OTHERS
from reports.tables import read, records

Row = dict[str, Any]

_DRAFTED = """
SELECT run_key, method, drafter_key, drafter_name, seed, device, dtype,
  workload, corpus, context, budget, policy, position_mode, gamma, gamma_mode, refresh, temperature, doc_id,
  accepted, drafted, far_accepted, far_rounds, ar_decode_s, decode_s, degenerate
FROM samples WHERE status = 'ok' AND gamma > 0 ORDER BY ALL
"""

# Settings of the grid that say which cells there are, not how one is measured.
_AXES = frozenset(
    ("corpus", "workloads", "methods", "contexts", "budgets", "budget_bytes", "policy", "position_mode", "gammas")
) | {"gamma_mode", "refresh", "prompts"}


def documents(workspace: Path) -> list[Row]:
    """One row per drafter, cell and document, over all runs; see `named`.

    Raises FileNotFoundError without results, ValueError when they cannot be read.
    """
    rows = read(workspace, lambda connection: records(connection, _DRAFTED))
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        keys[row["run_key"]][row["drafter_name"]] = row["drafter_key"]
    return named(rows, {run_key: run_facts(workspace, run_key, found) for run_key, found in keys.items()})


def run_facts(workspace: Path, run_key: str, drafter_keys: Mapping[str, str]) -> Row:
    """`study`, `created`, `finished` and `protocol` of a run, from its manifest and those of its drafters (by role).

    `study`: None where nothing names it. `protocol`: how samples were measured, apart from the axes of the grid. A run
    without a manifest (unfinished, or with failed cells) has a protocol of its own.
    """
    makers = (_study(workspace, drafter_keys.get(role)) for role in ("trained", "base"))
    study = next((name for name in makers if name), None)
    manifest = read_manifest(workspace / "results" / "samples" / f"run_key={run_key}")
    if manifest is None:
        return {"study": study, "created": "", "protocol": run_key, "finished": False}
    inputs = manifest.get("inputs") or {}
    settings = {k: v for k, v in (manifest.get("config") or {}).items() if k not in _AXES}
    return {
        "study": manifest.get("study") or study,
        "created": manifest["created"],
        "protocol": canonical_json([settings, inputs.get("verifier"), manifest.get("beyond_positions")]),
        "finished": True,
    }


def _study(workspace: Path, drafter_key: str | None) -> str | None:
    """The study that made a drafter, by its manifest."""
    try:
        return json.loads((workspace / "drafters" / str(drafter_key) / MANIFEST).read_text()).get("study")
    except (OSError, ValueError, AttributeError):
        return None


def named(rows: Iterable[Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Sample rows with `study` and `drafter`, each measurement once.

    A trained drafter is called by its study, the base drafter `base`, a method without a drafter by the method; a draft
    length or refresh other than the default is added. What several runs measured alike (same drafter, seed, hardware,
    dtype and grid settings) is one thing, of the alphabetically first study; of a document measured twice the newest
    run counts. Where a name still stands for several things at a seed, `@` and the start of a run's key follow, except
    for the only one whose run is finished.
    """
    ordered = sorted(rows, key=lambda r: (runs[r["run_key"]]["created"], r["run_key"]))
    things = [{**row, "thing": _thing(row, runs)} for row in ordered]
    found = list({(row["thing"], *(row[name] for name in _PLACE)): row for row in things}.values())
    studies = _studies(things, runs)
    names = _distinct(things, studies, runs)
    return [
        {
            **{k: v for k, v in row.items() if k != "thing"},
            "study": studies[row["thing"]],
            "drafter": names[row["thing"]],
        }
        for row in found
    ]


_PLACE = ("workload", "corpus", "context", "budget", "policy", "position_mode", "gamma", "doc_id")


def _thing(row: Mapping[str, Any], runs: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """What was measured and how: rows of one thing may be added up."""
    role = row["method"] if row["method"] in OTHERS else row["drafter_name"] or row["method"]
    maker = (role, row["drafter_key"], row["seed"], row["device"], row["dtype"])
    return *maker, row["gamma_mode"], _refresh(row), row["temperature"], runs[row["run_key"]]["protocol"]


def _refresh(row: Mapping[str, Any]) -> int:
    return row["refresh"] if row["budget"] > 0 else 0  # a full cache has nothing to choose anew


def _studies(rows: Iterable[Mapping[str, Any]], runs: Mapping[str, Mapping[str, Any]]) -> dict[tuple[Any, ...], str]:
    seen: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for row in rows:
        seen[row["thing"]].add(runs[row["run_key"]]["study"] or row["run_key"])
    return {thing: min(names) for thing, names in seen.items()}


def _distinct(
    rows: Iterable[Mapping[str, Any]], studies: Mapping[tuple[Any, ...], str], runs: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[Any, ...], str]:
    """A name for each thing; `rows` come oldest run first."""
    latest = {row["thing"]: row["run_key"] for row in rows}
    groups: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
    for thing in latest:
        groups[_name(thing, studies[thing]), thing[2]].append(thing)
    names: dict[tuple[Any, ...], str] = {}
    for (name, _), things in groups.items():
        finished = [thing for thing in things if runs[latest[thing]]["finished"]]
        plain = things if len(things) == 1 else finished if len(finished) == 1 else []
        names |= {thing: name if thing in plain else f"{name}@{latest[thing][:6]}" for thing in things}
    return names


def _name(thing: tuple[Any, ...], study: str) -> str:
    role, key, *_, gamma_mode, refresh, temperature, _ = thing
    name = role if role in ("base", SELF, *OTHERS) or key is None else study
    special = [
        gamma_mode if gamma_mode != "fixed" else "",
        f"refresh {refresh}" if refresh else "",
        f"temperature {temperature:g}" if temperature else "",
    ]
    return " ".join(part for part in (name, *special) if part)
