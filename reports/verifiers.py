"""Which verifier each run of a workspace was measured with: speedups over different verifiers do not compare."""

from pathlib import Path
from typing import Any

import duckdb

from bdcore.identity import read_manifest
from bdcore.schema import SELF
from bdcore.workspace import Workspace
from reports.tables import records

_TIMED = """
SELECT DISTINCT run_key FROM samples WHERE workload <> 'replay' AND gamma > 0 AND decode_s IS NOT NULL ORDER BY ALL
"""
# Keys of the study's own drafters follow from their verifier's; `self` has the verifier's own. A drafter that a grid
# names may serve several verifiers.
_DRAFTERS = f"""
SELECT DISTINCT run_key, drafter_name, drafter_key FROM samples
WHERE drafter_name IN ('base', 'trained', '{SELF}') ORDER BY ALL
"""


def check_one_verifier(workspace: Path, connection: duckdb.DuckDBPyConnection) -> None:
    """ValueError when the timed runs of a workspace have, or may have, more than one verifier."""
    runs = [row["run_key"] for row in records(connection, _TIMED)]
    manifests = {run: read_manifest(Workspace(workspace).samples(run)) or {} for run in runs}
    known = _verifiers(manifests, records(connection, _DRAFTERS))
    if len({known.get(run, run) for run in runs}) > 1:
        listed = "; ".join(_told(run, manifests[run].get("study"), known.get(run)) for run in runs)
        raise ValueError(
            f"speedups of different verifiers do not compare, and these runs are not known to share one: {listed}. "
            "Name one with --run, or its study with --config"
        )


def _verifiers(manifests: dict[str, dict[str, Any]], drafters: list[dict[str, Any]]) -> dict[str, str]:
    """Run -> key of its verifier: as its manifest has it, which an unfinished run lacks, or as its drafters tell."""
    known = {run: m["inputs"]["verifier"] for run, m in manifests.items() if "verifier" in m.get("inputs", {})}
    known = {r["run_key"]: r["drafter_key"] for r in drafters if r["drafter_name"] == SELF} | known
    made_for = {r["drafter_key"]: known[r["run_key"]] for r in drafters if r["run_key"] in known}
    return {r["run_key"]: made_for[r["drafter_key"]] for r in drafters if r["drafter_key"] in made_for} | known


def _told(run: str, study: str | None, verifier: str | None) -> str:
    name = f"study {study}, " if study else ""
    return f"run {run} ({name}verifier {verifier or 'not known: unfinished, or with failed cells'})"
