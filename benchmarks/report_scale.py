"""Seconds and memory of a report over many rows: a synthetic workspace, and the report of it in a process of its own.

Rows lie as the grid leaves them, written by `bdcore.schema`: one file of samples and one of rounds per document and
context, all methods in it. Their counts come from simulated decoding, so that totals, rounds and positions agree.

    python benchmarks/report_scale.py --samples 100000
    python benchmarks/report_scale.py --samples 100000 --keep scratch    # made once, measured again
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from bdcore.schema import FULL_BUDGET, ROUNDS, SAMPLES, write_rows

RUN = "5ca1e0000000"
CONTEXTS = (1024, 2048, 4096, 8192)
BUDGETS = (128, 256, 512, 1024, FULL_BUDGET)
GAMMAS = (2, 4, 8)
METHODS = {"sd_sparse": "base", "budgetdraft": "trained"}
NEW_TOKENS = 20
TEXT_CHARACTERS = 1000
"""Of an output: as long as 256 tokens of prose, since texts are what weighs."""

_REPORT = """
from pathlib import Path
from time import perf_counter
from reports.build import build_report
start = perf_counter()
build_report(Path({root!r}), {run!r}, Path({out!r}), facts={{}})
print(perf_counter() - start)
"""
_QUERY = """
from pathlib import Path
from time import perf_counter
from reports.tables import query
start = perf_counter()
query(Path({root!r}), "SELECT count(*), sum(n) FROM cells")
print(perf_counter() - start)
"""

SCRIPTS = {"report": _REPORT, "query": _QUERY}

Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    method: str
    context: int
    budget: int
    gamma: int

    @property
    def key(self) -> str:
        return f"{self.method}-{self.context}-{self.budget}-{self.gamma}"


def settings(context: int) -> list[Setting]:
    """The cells of one context, `ar` first."""
    drafting = [Setting(method, context, budget, gamma) for method in METHODS for budget in BUDGETS for gamma in GAMMAS]
    return [Setting("ar", context, FULL_BUDGET, 0), *drafting]


def documents(samples: int) -> int:
    """Documents that give at least `samples` rows."""
    return -(-samples // sum(len(settings(context)) for context in CONTEXTS))


def make_workspace(root: Path, samples: int) -> None:
    """Write at least `samples` sample rows and their rounds below `root`."""
    words = np.array([f"w{i:x}" for i in range(4096)])
    for document in range(documents(samples)):
        rng = np.random.default_rng([document, 0])
        text = " ".join(rng.choice(words, TEXT_CHARACTERS // 4))[:TEXT_CHARACTERS]
        ease = rng.uniform(0.5, 0.95)
        for context in CONTEXTS:
            rows, rounds = _measured(rng, document, context, ease, text)
            name = f"part-context-{context:06d}-00-{document:04d}.parquet"
            write_rows(root / "results" / "samples" / f"run_key={RUN}" / name, rows, SAMPLES)
            write_rows(root / "results" / "rounds" / f"run_key={RUN}" / name, rounds, ROUNDS)


def _measured(
    rng: np.random.Generator, document: int, context: int, ease: float, text: str
) -> tuple[list[Row], list[Row]]:
    rows, rounds = list[Row](), list[Row]()
    for setting in settings(context):
        found = list(_rounds(rng, setting, document, _agreement(setting, ease)))
        rounds += found
        rows.append(_sample(rng, setting, document, found, text, failed=setting.gamma > 0 and rng.random() < 1e-4))
    return rows, rounds


def _agreement(setting: Setting, ease: float) -> float:
    """Chance that a drafted token is the verifier's: the base fades with context, and small budgets cost a little."""
    fade = {"sd_sparse": 0.35, "budgetdraft": 0.05, "ar": 0.0}[setting.method] * np.log2(setting.context / 1024)
    lost = 0.0 if setting.budget == FULL_BUDGET else 0.04 * np.log2(2048 / setting.budget)
    return float(np.clip(ease - fade * ease - lost, 0.02, 0.98))


def _rounds(rng: np.random.Generator, setting: Setting, document: int, agreement: float) -> Iterator[Row]:
    done, index = 1, 0
    cached = setting.context if setting.budget == FULL_BUDGET else setting.budget
    while done < NEW_TOKENS:
        drafted = min(setting.gamma, NEW_TOKENS - done - 1)
        accepted = min(int(rng.geometric(1 - agreement)) - 1, drafted)
        yield dict.fromkeys(ROUNDS.names) | {
            "run_key": RUN, "cell_key": setting.key, "doc_id": f"doc-{document}", "method": setting.method,
            "workload": "greedy", "context": setting.context,
            "budget": setting.budget, "gamma": setting.gamma, "round": index,
            "drafted": drafted, "accepted": accepted, "emitted": accepted + 1,
            "draft_s": 2e-3 * drafted, "select_s": 1e-4, "verify_s": float(rng.uniform(0.02, 0.03)),
            "overhead_s": 1e-4, "drafter_cached": cached if setting.gamma else 0,
            "drafter_kv_bytes": 4096 * cached if setting.gamma else 0, "verifier_kv_bytes": 23040 * setting.context,
        }  # fmt: skip
        done, index = done + accepted + 1, index + 1


def _sample(
    rng: np.random.Generator, setting: Setting, document: int, found: list[Row], text: str, *, failed: bool
) -> Row:
    drafting = setting.gamma > 0
    sums = {name: float(sum(r[name] for r in found)) for name in ("draft_s", "select_s", "verify_s", "overhead_s")}
    decode_s, alone_s = sum(sums.values()), 0.025 * NEW_TOKENS
    prefill_s, draft_prefill_s = setting.context / 2000, setting.context / 20000 if drafting else 0.0
    depth = [sum(r["drafted"] > i for r in found) for i in range(setting.gamma)]
    identity = {
        "run_key": RUN, "cell_key": setting.key, "method": setting.method,
        "drafter_key": METHODS.get(setting.method), "drafter_name": METHODS.get(setting.method),
        "workload": "greedy", "corpus": "stdlib", "doc_id": f"doc-{document}", "context": setting.context,
        "budget": setting.budget, "policy": "full" if setting.budget == FULL_BUDGET else "attention_mass",
        "position_mode": "absolute", "gamma": setting.gamma, "gamma_mode": "fixed", "refresh": 0, "temperature": 0.0,
        "seed": 0, "prompt_len": setting.context, "device": "cpu", "dtype": "float32",
    }  # fmt: skip
    measured = {
        **sums, "new_tokens": NEW_TOKENS, "finish_reason": "length", "rounds": len(found),
        "drafted": sum(r["drafted"] for r in found), "accepted": sum(r["accepted"] for r in found),
        "accepted_at": [sum(r["accepted"] > i for r in found) for i in range(setting.gamma)], "drafted_at": depth,
        "prefill_s": prefill_s, "draft_prefill_s": draft_prefill_s, "ttft_s": prefill_s, "decode_s": decode_s,
        "wall_s": prefill_s + draft_prefill_s + decode_s, "ar_wall_s": prefill_s + alone_s, "ar_decode_s": alone_s,
        "drafter_kv_bytes_peak": max((r["drafter_kv_bytes"] for r in found), default=0),
        "verifier_kv_bytes_peak": 23040 * setting.context,
        "drafter_cached_peak": max((r["drafter_cached"] for r in found), default=0),
        "output_text": text, "output_ids": rng.integers(0, 49152, NEW_TOKENS).tolist(),
        "distinct_1": 0.6, "distinct_2": 0.8, "distinct_4": float(rng.uniform(0.5, 1.0)),
        "degenerate": bool(rng.random() < 0.2), "exact_match": True, "status": "ok",
    }  # fmt: skip
    outcome = {"status": "failed", "error": "RuntimeError: out of memory (decode, line 1)"} if failed else measured
    return dict.fromkeys(SAMPLES.names) | identity | outcome


def measured(code: str) -> dict[str, float]:
    """Wall and processor seconds and the peak memory (MiB) of Python running `code`, start and imports included; and
    the seconds of its work, which it prints."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with child.stdout as printed:
        told = printed.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"the measured process ended with {child.returncode}")
    seconds = time.perf_counter() - start
    spent = usage.ru_utime + usage.ru_stime
    return {"wall_s": seconds, "work_s": float(told), "cpu_s": spent, "peak_mib": usage.ru_maxrss / 1024}


def count(root: Path, kind: str) -> tuple[int, int]:
    """Rows and files of `samples` or `rounds`."""
    files = list((root / "results" / kind).rglob("*.parquet"))
    return sum(pq.read_metadata(file).num_rows for file in files), len(files)


def run(root: Path, samples: int, repeats: int) -> dict[str, Any]:
    if not (root / "results").is_dir():
        make_workspace(root, samples)
    with tempfile.TemporaryDirectory() as out:
        scripts = {name: code.format(root=str(root), run=RUN, out=out) for name, code in SCRIPTS.items()}
        times = {name: [measured(code) for _ in range(repeats)] for name, code in scripts.items()}
    rows = {kind: dict(zip(("rows", "files"), count(root, kind), strict=True)) for kind in ("samples", "rounds")}
    return {**rows, **times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000, help="sample rows at least; about ten rounds each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--keep", type=Path, help="folder of the workspace; made where it is not there (default: a temporary one)"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(given.keep or Path(folder), given.samples, given.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
