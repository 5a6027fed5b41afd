"""One training stage in several processes: started by torchrun on this machine, joined by `bdcore.training.team`.

The first process prints its log records, one JSON line each. Weights come back by the stage's checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch

from bdcore.config import TrainingConfig
from bdcore.identity import write_json
from bdcore.models.drafter import load_drafter, save_drafter
from bdcore.models.loading import quiet
from bdcore.targets.rows import TargetRows
from bdcore.training import checkpoint
from bdcore.training.checkpoint import Checkpoints, TrainingState
from bdcore.training.loop import Interrupted, OnStep, Stage, ended, train
from bdcore.training.team import joined_team


@dataclass(frozen=True)
class _Order:
    """What a process is told, by a JSON file."""

    drafter: str
    targets: str
    config: dict[str, Any]
    seed: int
    dtype: str
    device: str
    state: str
    freeze_embedding: bool
    launcher: tuple[int, float]
    """Process id and start time of who waits for them."""


def train_together(stage: Stage, targets: Path, on_step: OnStep | None = None) -> TrainingState:
    """`train` in `config.processes` processes. The stage's drafter ends with the weights they agreed on.

    Raises Interrupted on SIGTERM, with the step that is saved, unless it was the last one; RuntimeError with the last
    lines of their output where they fail.
    """
    with tempfile.TemporaryDirectory(prefix="budgetdraft-") as folder:
        start = Path(folder) / "drafter"
        with quiet():
            save_drafter(stage.drafter, start, tokenizer=None, facts={})
        device = stage.drafter.model.device.type
        config = stage.config.model_dump(mode="json")
        state = str(stage.checkpoints.state)
        me = (os.getpid(), psutil.Process().create_time())
        facts = (str(targets), config, stage.seed, stage.dtype, device, state, stage.freeze_embedding, me)
        order = _Order(str(start), *facts)
        write_json(Path(folder) / "order.json", asdict(order))
        told = _run(stage, Path(folder) / "order.json", on_step)
    stage.drafter.model.model.embed_tokens.requires_grad_(not stage.freeze_embedding)
    found = checkpoint.load(stage.checkpoints.state, stage.drafter.model)
    if told and (found is None or not ended(found, stage.config)):
        raise Interrupted(_what_is_saved(found, stage.config))
    if found is None:
        raise RuntimeError(f"training left no checkpoint at {stage.checkpoints.state}")
    if stage.config.validation.keep == "best" and found.best_step not in (0, found.step):
        checkpoint.load(stage.checkpoints.best, stage.drafter.model)
    return found


def _what_is_saved(found: TrainingState | None, config: TrainingConfig) -> str:
    if found is None:
        return "stopped by SIGTERM before anything was saved; run the same command to begin again"
    return f"stopped by SIGTERM; step {found.step} of {config.steps} is saved, run the same command to go on"


def _run(stage: Stage, order: Path, on_step: OnStep | None) -> bool:
    """Start them and wait. Whether SIGTERM came, which is passed on once: torchrun loses its patience at another."""
    command, environment = _command(stage.config.processes, order), _environment(stage)
    errors = order.with_name("errors.log")
    with errors.open("w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
        before = signal.getsignal(signal.SIGTERM)
        told = threading.Event()

        def pass_on(number: int, frame: FrameType | None) -> None:
            if not told.is_set():
                told.set()
                process.terminate()

        _on_sigterm(pass_on)
        try:
            reasons = _read(process, on_step)
            code = process.wait()
        finally:
            _on_sigterm(before)
            if process.poll() is None:
                process.kill()
    if code and not told.is_set():
        reason = reasons[0] if reasons else " ".join(errors.read_text()[-2000:].split())
        raise RuntimeError(f"{stage.config.processes} training processes ended with {code}: {reason}")
    return told.is_set()


_LONGEST_STEP_S = 3600
"""What torchrun waits after SIGTERM before it kills. Its own 30 seconds are less than a long step takes, or a
validation, after which the state is saved."""


def _command(count: int, order: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={count}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    return [*command, f"--shutdown-timeout={_LONGEST_STEP_S}", "-m", "bdcore.training.processes", str(order)]


def _environment(stage: Stage) -> dict[str, str]:
    threads = stage.threads or max(1, len(os.sched_getaffinity(0)) // stage.config.processes)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if stage.drafter.model.device.type == "cpu":
        # gloo would look for a network interface by the host's name, which may not resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _read(process: "subprocess.Popen[str]", on_step: OnStep | None) -> list[str]:
    """Tell the log records that the processes print, as they come. Their errors."""
    assert process.stdout is not None
    reasons: list[str] = []
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if "error" in found:
            reasons.append(found["error"])
        elif found and on_step:
            on_step(found)
    return reasons


def _on_sigterm(handler: Any) -> None:
    try:
        signal.signal(signal.SIGTERM, handler)
    except ValueError:  # only the main thread may
        return


def _end_with(launcher: tuple[int, float]) -> None:
    """Leave once nobody waits any more: a killed launcher's successor would write the same checkpoint."""
    while True:
        try:
            alive = psutil.Process(launcher[0]).create_time() == launcher[1]
        except psutil.NoSuchProcess:
            alive = False
        if not alive:
            os._exit(1)
        time.sleep(0.5)


def _tell(record: Any) -> None:
    """A line for the launcher, written at once: a line and its end apart would mix with those of other processes."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main(order_file: str) -> None:
    """A single process of the team."""
    order = _Order(**json.loads(Path(order_file).read_text()))
    threading.Thread(target=_end_with, args=(order.launcher,), daemon=True).start()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local}" if order.device == "cuda" else order.device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with joined_team(device) as team, quiet():
        config = TrainingConfig.model_validate(order.config)
        drafter = load_drafter(order.drafter, verifier_vocab=1 << 60, dtype=torch.float32, device=device)
        stage = Stage(
            drafter,
            TargetRows(Path(order.targets)),
            config,
            order.seed,
            order.dtype,
            Checkpoints(Path(order.state)),
            order.freeze_embedding,
            team,
        )
        try:
            train(stage, on_step=_tell)
        except Interrupted:
            sys.exit(128 + signal.SIGTERM)
        except Exception as error:
            _tell({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main(sys.argv[1])
