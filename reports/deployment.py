"""A recommended setting as text, JSON and the flags of serving engines, from the rows of a workspace."""

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import duckdb

from bdcore.collapse.recommend import Option, Recommendation, Setting, recommend
from reports.measured import Measured, measure
from reports.tables import read, records


def recommended(
    workspace: Path, *, context: int, memory: int, batch: int = 1, run_key: str | None = None
) -> Recommendation:
    """The setting that the timed rows of a workspace, or of one run, speak for."""

    def measured(connection: duckdb.DuckDBPyConnection) -> list[Measured]:
        found = [row["run_key"] for row in records(connection, "SELECT DISTINCT run_key FROM samples ORDER BY ALL")]
        return [cell for key in found for cell in measure(connection, key)]

    cells = read(workspace, measured, run_key=run_key)
    return recommend(list(options(cells)), context=context, memory=memory, batch=batch)


def options(cells: Iterable[Measured]) -> Iterable[Option]:
    """Timed settings that draft. Two runs, corpora or temperatures at one context give several options of a setting."""
    for cell in cells:
        row = cell.row
        if row["gamma"] and row["workload"] != "replay" and cell.decode_speedup.value is not None:
            setting = Setting(
                row["method"],
                row["drafter_name"],
                row["budget"],
                row["policy"],
                row["position_mode"],
                row["gamma"],
                row["gamma_mode"],
            )
            size = int(row["drafter_kv_bytes_peak"] or 0)
            yield Option(setting, row["context"], size, cell.decode_speedup, cell.acceptance)


def as_json(found: Recommendation) -> str:
    return json.dumps({**asdict(found), "engines": engines(found)}, indent=2)


def engines(found: Recommendation, model: str = "DRAFTER", verifier: str = "VERIFIER") -> dict[str, dict[str, Any]]:
    """Per engine: the flags of an independent draft model that it honours, and what of the setting it cannot do."""
    if found.option is None or found.status != "on":
        return {}
    setting = found.option.setting
    if setting.method == "ngram":
        return {"vllm": _vllm_lookup(verifier, setting)}
    missing = [] if setting.budget < 0 else [f"the budget of {setting.budget} keys chosen by {setting.policy}"]
    missing += [] if setting.position_mode == "absolute" else [f"{setting.position_mode} positions"]
    missing += [] if setting.gamma_mode == "fixed" else [f"a {setting.gamma_mode} draft length"]
    return {"vllm": _vllm(verifier, model, setting, missing), "sglang": _sglang(verifier, model, setting, missing)}


def _vllm(verifier: str, model: str, setting: Setting, missing: list[str]) -> dict[str, Any]:
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": setting.gamma}
    notes = [f"cannot do {what}" for what in missing]
    if setting.budget > 0:
        notes.append(
            "a draft model's own `sliding_window` is honoured: the newest keys alone, without sinks and without "
            f"chosen chunks. Measure policy sink_recent before you set it to {setting.budget}"
        )
    return {"flags": f"vllm serve {verifier} --speculative-config {shlex.quote(json.dumps(config))}", "notes": notes}


def _vllm_lookup(verifier: str, setting: Setting) -> dict[str, Any]:
    config = {"method": "ngram", "num_speculative_tokens": setting.gamma, "prompt_lookup_max": 3}
    return {"flags": f"vllm serve {verifier} --speculative-config {shlex.quote(json.dumps(config))}", "notes": []}


def _sglang(verifier: str, model: str, setting: Setting, missing: list[str]) -> dict[str, Any]:
    flags = (
        f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {model} --speculative-num-steps {setting.gamma} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {setting.gamma + 1}"
    )
    notes = [f"cannot do {what}" for what in missing]
    if setting.budget > 0:
        notes.append("`--speculative-draft-window-size` has no effect with STANDALONE: the draft cache stays full")
    return {"flags": flags, "notes": notes}


def as_text(found: Recommendation) -> str:
    lines = list(found.sentences)
    for engine, what in engines(found).items():
        lines += ["", f"{engine}:", f"  {what['flags']}", *(f"  note: {note}" for note in what["notes"])]
    return "\n".join(lines)
