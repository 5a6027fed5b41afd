"""The share of a grid's time that is not spent in models: Prefect, MLflow, Parquet, documents, rows, imports.

    python benchmarks/orchestration.py                       # 3 methods x 4 contexts x 5 budgets x 2 gammas x 8 prompts
    python benchmarks/orchestration.py --prompts 2           # a quarter of it: what is paid once weighs more
    python benchmarks/orchestration.py --config configs/quick.yaml --set grid.workloads=[greedy]   # the embedded pair

The default pair is the tests' tiny one, whose models cost almost nothing: every other pair's share is smaller. Targets
and drafters are made first, by a process of their own. Then `budgetdraft run CONFIG --stage evaluation` runs in this
process with a timer around each part, imports and the start of Prefect's server included. The report is another stage
and is not made. A part's seconds leave out those of the parts inside it, so they add up to the total.

in models   every call of `prefill` and `decode` while cells are measured, the repeats of `ar` among them
grows       what grows with the grid: over the seconds in models, the share of a grid that takes hours
once        what a grid of any size pays a single time: flow and task runs, models loaded
start       libraries and Prefect's server: once for each command, however many stages it runs

Prefect's server is a process beside this one; its processor seconds stand below the table. The last line printed is one
JSON object.
"""

import argparse
import cProfile
import json
import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.clock import Clock, watch
from benchmarks.workspaces import linked, run_stage, settings

GRID = {
    "methods": ["ar", "sd_sparse", "streaming", "budgetdraft"],  # `ar` is what the three are measured against
    "contexts": [64, 96, 128, 192],
    "budgets": [32, 40, 48, 56, 64],
    "gammas": [2, 4],
}
MODELS, GROWS, ONCE, START = "in models", "grows", "once", "start"
LIMIT = 0.05
OTHER_S = 2.0
"""Seconds in models of a sample of another pair, for comparison."""
KINDS = (MODELS, GROWS, ONCE, START)


@dataclass(frozen=True)
class Part:
    """A line of the table: seconds inside these callables, each given as `module:name`."""

    kind: str
    name: str
    places: Sequence[str] = ()


IMPORTS = Part(START, "libraries imported")
REST = Part(ONCE, "flow and task runs, and what no timer saw")
PARTS = (
    Part(MODELS, "prompts read by the verifier", ["bdcore.evaluation.cell:prefill"]),
    Part(
        MODELS,
        "decoding, repeats of `ar` included",
        [f"bdcore.evaluation.cell:{n}" for n in ("decode", "decode_assisted")],
    ),
    Part(GROWS, "rows made of what was decoded", ["tasks.evaluation:measure_prompt"]),
    Part(GROWS, "rows checked and written to Parquet", ["tasks.evaluation:write_rows"]),
    Part(GROWS, "progress: log lines, artifacts", ["tasks.evaluation:Progress.__call__"]),
    Part(GROWS, "prompts cut from documents", ["tasks.evaluation:_disjoint"]),
    Part(GROWS, "finished files looked for", ["tasks.evaluation:_kept", "tasks.evaluation:_failures"]),
    Part(GROWS, "MLflow: curves of every method", ["flows.evaluation:record_grid"]),
    Part(
        GROWS, "cells and intervals by DuckDB, twice", ["tasks.recording:summary_rows", "reports.measured:summary_rows"]
    ),
    Part(
        GROWS,
        "locks, keys, manifest, the table printed",
        ["tasks.evaluation:_measure", "tasks.evaluation:write_manifest", "flows.cli:_summary"],
    ),
    Part(ONCE, "study opened and checked", ["bdcore.study:open_study", "flows.cli:_check_tokens"]),
    Part(ONCE, "stages before, found done", ["tasks.targets:generate_targets.fn", "tasks.training:_drafter"]),
    Part(
        ONCE, "models loaded, warmed up", [f"tasks.evaluation:{n}" for n in ("load_model", "load_drafter", "warm_up")]
    ),
    Part(ONCE, "MLflow: its database opened", ["flows.evaluation:connect"]),
    REST,
    Part(START, "Prefect's server started", ["prefect.server.api.server:SubprocessASGIServer.start"]),
    IMPORTS,
)


def tiny_study(folder: Path, prompts: int, new_tokens: int) -> Path:
    """The tests' tiny pair under a grid of the size above; returns the path of its configuration."""
    from tests.tiny import tiny_config, write_corpus, write_verifier

    corpus = write_corpus(folder / "texts", count=16 + 8 * prompts)  # a quarter of them is for evaluation
    config = tiny_config(write_verifier(folder / "verifier"), corpus)
    config["grid"] |= {**GRID, "prompts": prompts, "new_tokens": new_tokens}
    path = folder / "orchestration.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass(frozen=True)
class Found:
    """What one run of the stage took."""

    seconds: Mapping[str, float]
    """By part."""
    server_cpu_s: float
    """Processor seconds of Prefect's server, its start included."""

    def of(self, *kinds: str) -> float:
        """Seconds of all parts of these kinds."""
        return sum(self.seconds[part.name] for part in PARTS if part.kind in kinds)

    def share(self, *kinds: str) -> float:
        """These kinds against the seconds in models."""
        return self.of(*kinds) / self.of(MODELS)


def measure(config: str, changes: Sequence[str], profile: Path | None = None) -> Found:
    """The evaluation stage as the command line runs it, in this process."""
    clock = Clock()
    with _profiled(profile), clock.part(REST.name):
        with clock.part(IMPORTS.name):
            cli = _watched(clock)
        code = cli.app(["run", config, "--stage", "evaluation", *settings(changes)], standalone_mode=False)
        server = sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children(recursive=True))
    if code:
        raise RuntimeError(f"the evaluation stage ended with {code}")
    return Found(clock.seconds, server)


def _watched(clock: Clock) -> Any:
    """The command line, a timer around every part. Imported only now: Prefect reads its settings as it is imported."""
    from bdcore.workspace import Workspace, default_root
    from flows import cli

    cli._prefect_settings(Workspace(default_root()))  # pyright: ignore[reportPrivateUsage]
    for part in PARTS:
        for place in part.places:
            watch(clock, part.name, place)
    return cli


@contextmanager
def _profiled(path: Path | None) -> Generator[None]:
    if path is None:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(path)


def samples(workspace: Path) -> int:
    """Rows that a workspace holds."""
    import pyarrow.parquet as pq

    files = (workspace / "results" / "samples").rglob("part-*.parquet")
    return sum(pq.read_metadata(file).num_rows for file in files)


def table(found: Found) -> str:
    """Seconds of every part and kind, and their share of the seconds in models."""
    lines = [f"{'':10}{'':44}{'seconds':>9}{'of models':>11}"]
    for kind in KINDS:
        parts = [part for part in PARTS if part.kind == kind]
        lines += [_line("", part.name, found.seconds[part.name], found) for part in parts]
        lines.append(_line(kind, "together", found.of(kind), found))
    return "\n".join([*lines, _line("total", "", found.of(*KINDS), found)])


def _line(kind: str, name: str, seconds: float, found: Found) -> str:
    return f"{kind:10}{name:44}{seconds:9.2f}{seconds / found.of(MODELS):11.1%}"


def summary(found: Found, count: int) -> dict[str, Any]:
    """The figures to quote."""
    return {
        "samples": count,
        "models_s": round(found.of(MODELS), 2),
        "total_s": round(found.of(*KINDS), 2),
        "share_growing": round(found.share(GROWS), 4),
        "share_without_start": round(found.share(GROWS, ONCE), 4),
        "share_with_start": round(found.share(GROWS, ONCE, START), 4),
        "models_s_per_sample": round(found.of(MODELS) / count, 4),
        "outside_s_per_sample": round(found.of(GROWS) / count, 4),
        "once_s": round(found.of(ONCE), 2),
        "start_s": round(found.of(START), 2),
        "server_cpu_s": round(found.server_cpu_s, 2),
        "parts": {part.name: round(found.seconds[part.name], 3) for part in PARTS},
    }


def words(facts: Mapping[str, Any]) -> str:
    """What the figures say of this pair, and of one whose samples take longer."""
    outside, fixed = facts["outside_s_per_sample"], facts["once_s"] + facts["start_s"]
    growing, once, start = (facts[f"share_{name}"] for name in ("growing", "without_start", "with_start"))
    grown, all_of_it = outside / OTHER_S, (outside + fixed / facts["samples"]) / OTHER_S
    lines = [
        f"Outside the models, of the time in them ({LIMIT:.0%} asked for): {growing:.1%} that grows with the grid,",
        f"{once:.1%} with what is paid once, {start:.1%} with the start as well.",
        f"A sample takes {1000 * facts['models_s_per_sample']:.0f} ms in models and {1000 * outside:.1f} ms outside;",
        f"{fixed:.0f} s are paid whatever the grid. As many samples of {OTHER_S:.0f} s, the embedded pair's,",
        f"would make these {grown:.2%}, and {all_of_it:.1%} with the start.",
        f"Prefect's server, a process beside: {facts['server_cpu_s']:.0f} s of a processor, its start included.",
    ]
    return "\n".join(lines)


def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make what is missing, then measure in a workspace of its own below `folder`."""
    from bdcore.workspace import default_root

    os.environ["PREFECT_HOME"] = str(folder / "prefect")
    tiny = given.config is None
    config = str(tiny_study(folder, given.prompts, given.new_tokens) if tiny else given.config)
    workspace = linked(folder / "workspace", folder / "made" if tiny else default_root())
    run_stage(workspace, config, "training", given.set)
    os.environ["BUDGETDRAFT_HOME"] = str(workspace)
    found = measure(config, given.set, given.profile)
    facts = summary(found, samples(workspace))
    print(f"{table(found)}\n\n{words(facts)}")
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of the tiny pair's grid, per context")
    parser.add_argument("--new-tokens", type=int, default=12, help="of the tiny pair's grid; 12 as in the tests")
    parser.add_argument("--config", help="another study; its models, targets and drafters are those of your workspace")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in `budgetdraft run`")
    parser.add_argument("--profile", type=Path, help="also write a profile by function here (slows everything)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(given, Path(folder))))


if __name__ == "__main__":
    main()
