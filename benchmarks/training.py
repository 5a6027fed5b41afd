"""Tokens supervised per second, and what they are worth: the paper's scheme against dense supervision.

Trains the same base drafter by each scheme for the same number of seconds in one process, one scheme after another,
and measures held-out acceptance through the cache of decoding before and after. Every run has a schedule of its own
steps, with the study's share of warmup. A step of dense supervision has many times the tokens of the paper's, so each
scheme can be tried at several learning rates (`--rates`, times the study's), and on sequences of its own length
(`dense:1024`); all are judged after `--length` tokens. Needs a study whose targets and base drafter are made:
`budgetdraft run CONFIG` makes them, also when it is stopped during the multi-view stage.

    python benchmarks/training.py --config configs/cpu.yaml --length 4096 --minutes 10 --schemes paper dense dense:1024
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bdcore.config import TrainingConfig, ValidationConfig
from bdcore.identity import read_manifest
from bdcore.models.drafter import load_drafter
from bdcore.models.loading import quiet
from bdcore.runtime import seed_for
from bdcore.study import Study, open_study
from bdcore.targets.rows import TargetRows
from bdcore.training.batches import split_validation
from bdcore.training.checkpoint import Checkpoints
from bdcore.training.loop import Stage, train
from bdcore.training.validation import held_out_batches, validate
from reports.files import csv_of, write_text

SCHEMES: dict[str, dict[str, Any]] = {
    # One continuation of 256 tokens after the prefix, read without gradients; both losses on it.
    "paper": {"supervise": "continuation", "detach_prefix": True, "continuation": 256},
    # L_A on every position, L_C on the one continuation.
    "all": {"supervise": "all", "detach_prefix": False, "continuation": 256},
    # L_A on every position, L_C on every block.
    "dense": {"supervise": "dense", "detach_prefix": False, "continuation": 32},
}


def scheme(config: TrainingConfig, name: str, length: int, steps: int, faster: float = 1.0) -> TrainingConfig:
    changes = SCHEMES[name]
    more = {
        "steps": steps,
        "warmup": min(steps - 1, round(steps * config.warmup / config.steps)),
        "learning_rate": faster * config.learning_rate,
        "prefix_lengths": {length - changes["continuation"]: 1.0},
        "validation": ValidationConfig(sequences=config.validation.sequences, every=10**9),
        "checkpoint_every": 10**9,
    }
    return config.model_copy(update={**changes, **more})


def measure(study: Study, spec: str, judged_at: int, seconds: float, faster: float) -> dict[str, Any]:
    """Train for `seconds` of training time; rates, and acceptance afterwards."""
    name, _, own = spec.partition(":")
    length = int(own or judged_at)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        warm = _run(study, scheme(study.config.training, name, length, 2), Path(folder) / "warm.pt")
        pace = (time.perf_counter() - start) / len(warm[1])
        steps = max(3, round(seconds / pace))  # the schedule ends with the time
        start = time.perf_counter()
        config = scheme(study.config.training, name, length, steps, faster)
        drafter, log = _run(study, config, Path(folder) / "state.pt")
        spent = time.perf_counter() - start
    tokens = sum(record["tokens"] for record in log)
    return {
        "scheme": name,
        "length": length,
        "learning_rate": config.learning_rate,
        "warmup": config.warmup,
        "steps": steps,
        "seconds": spent,
        "supervised_tokens": tokens,
        "tokens_per_s": tokens / spent,
        **judged(study, drafter, judged_at),
    }


def _run(study: Study, config: TrainingConfig, state: Path) -> tuple[Any, list[dict[str, Any]]]:
    drafter = _base(study)
    rows = TargetRows(study.workspace.targets(study.keys.targets))
    seed = seed_for(study.config.seed, "training benchmark")
    config = config.model_copy(update={"validation": config.validation.model_copy(update={"sequences": 0})})
    held = _without_held_out(rows, study.config.training.validation.sequences)
    stage = Stage(drafter, held, config, seed, study.runtime.training_dtype, Checkpoints(state))
    return drafter, train(stage).log


def _without_held_out(rows: TargetRows, count: int) -> TargetRows:
    kept, _ = split_validation(rows, count)
    return TargetRows.of([vars(rows[i]) for i in kept])


def _base(study: Study) -> Any:
    with quiet():
        return load_drafter(
            str(study.workspace.drafter(study.keys.base)),
            verifier_vocab=study.inputs.verifier.vocab,
            dtype=torch.float32,
            device=study.runtime.device,
        )


def judged(study: Study, drafter: Any, length: int) -> dict[str, float]:
    """Held-out acceptance of one-token drafts through the cache of decoding, by view, after `length` tokens."""
    training = study.config.training
    count = training.validation.sequences
    config = scheme(training, "paper", length, 1).model_copy(
        update={"validation": ValidationConfig(sequences=count, decode_tokens=128)}
    )
    rows = TargetRows(study.workspace.targets(study.keys.targets))
    _, held_out = split_validation(rows, count)
    batches = held_out_batches(rows, held_out, drafter, config.longest)
    found = validate(drafter, batches, config, seed=0)["decoded"]
    return {**found, "mean": sum(found.values()) / len(found)}


def _spec(text: str) -> str:
    name, _, own = text.partition(":")
    if name not in SCHEMES or (own and not own.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}: one of {', '.join(SCHEMES)}, or one with a length, as dense:1024")
    return text


def _said(row: dict[str, Any]) -> dict[str, Any]:
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/cpu.yaml", help="study with finished targets and base drafter")
    parser.add_argument("--set", action="append", default=[], help="section.field=value, as in `budgetdraft run`")
    parser.add_argument("--length", type=int, default=4096, help="tokens per sequence, and before judged positions")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each scheme")
    names = ", ".join(SCHEMES)
    parser.add_argument("--schemes", nargs="+", type=_spec, default=list(SCHEMES), help=f"of {names}; or name:tokens")
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0], help="learning rates, times the study's")
    parser.add_argument("--out", type=Path, default=Path("workspace/benchmarks/training.csv"))
    options = parser.parse_args(argv)
    study = open_study(options.config, options.set)
    for what, folder in (
        ("targets", study.workspace.targets(study.keys.targets)),
        ("base drafter", study.workspace.drafter(study.keys.base)),
    ):
        if read_manifest(folder) is None:
            parser.error(f"--config = {options.config}: its {what} are not made; run `budgetdraft run` on it first")
    before = {"scheme": "before", "length": options.length}
    rows = [_said({**before, **judged(study, _base(study), options.length)})]
    for faster in options.rates:
        for spec in options.schemes:
            rows.append(_said(measure(study, spec, options.length, 60 * options.minutes, faster)))
    paper = next((r["tokens_per_s"] for r in rows if r["scheme"] == "paper"), None)
    for row in rows:
        row["ratio_to_paper"] = row["tokens_per_s"] / paper if paper and "tokens_per_s" in row else None
        if row["ratio_to_paper"]:
            print(f"{row['scheme']} of {row['length']}: {row['ratio_to_paper']:.2f}x the paper's tokens/s")
    write_text(options.out, csv_of(rows))
    return rows


if __name__ == "__main__":
    main()
