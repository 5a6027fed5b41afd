"""`budgetdraft plan`: what a study would run, counted and costed before anything runs."""

from collections.abc import Iterator
from itertools import product

import torch

from bdcore.config import OWN_DRAFTERS, Config, ConfigError, GridConfig, TrainingConfig
from bdcore.evaluation.grid import GREEDY, REPLAY, SAMPLED, WRITTEN, Cell, cells, writes
from bdcore.evaluation.replay import all_positions
from bdcore.identity import read_manifest
from bdcore.keys import Keys, study_keys
from bdcore.kv.budget import FULL, STORES_ALL
from bdcore.models.shape import ModelShape
from bdcore.preflight import check, inputs
from bdcore.runtime import Runtime, resolve
from bdcore.schema import SELF
from bdcore.workspace import Workspace

# Rates of a machine, in floating-point operations per second: what matters is the order of magnitude.
_MATRIX_FLOPS = {"cpu": 30e9, "cuda": 100e12}
"""Per core (CPU) or device, for forwards over many tokens."""
_BYTES_PER_S = {"cpu": 6e9, "cuda": 1.5e12}
"""Weights read per second in one-token steps."""


def describe(config: Config, workspace: Workspace) -> Iterator[str]:
    """The plan as lines of text."""
    runtime = resolve(config.runtime)
    verifier, drafter = check(config)
    keys = _keys(config, runtime)
    yield f"study {config.name}, seed {config.seed}; {runtime.reason}"
    yield f"workspace {workspace.root}"
    yield f"verifier {config.verifier.source}: {_shape(verifier)}"
    yield f"drafter  {config.drafter.kind}: {_shape(drafter)}, trained for {drafter.positions} positions"
    yield ""
    yield from _stages(config, keys, workspace)
    yield ""
    yield from _grid(config)
    yield ""
    yield from _costs(config, runtime, verifier, drafter)


def _keys(config: Config, runtime: Runtime) -> Keys | ConfigError:
    """Keys need the documents' content; where those cannot be had, the plan says why."""
    try:
        return study_keys(config, runtime, inputs(config))
    except ConfigError as error:
        if all(corpus.offline for corpus in (*config.corpus, *config.grid.corpus)):
            raise
        return error


def _shape(shape: ModelShape) -> str:
    return f"{shape.parameters / 1e6:,.0f} M weights, {shape.layers} layers, {shape.query_heads}/{shape.kv_heads} heads"


def _stages(config: Config, keys: Keys | ConfigError, workspace: Workspace) -> Iterator[str]:
    targets = config.targets
    tokens = targets.forced * targets.length + targets.generated * targets.new_tokens
    what = {
        "targets": f"{targets.forced} forced x {targets.length} + {targets.generated} generated x {targets.new_tokens} "
        f"= {tokens:,} tokens",
        "base": _training(config.base) if config.base else "as it is, no training",
        "trained": _training(config.training),
        "run": f"{len(cells(config.grid))} cells x {_documents(config.grid)} documents",
    }
    yield "stages (key, state, what)"
    for stage, text in what.items():
        if isinstance(keys, Keys):
            key = getattr(keys, stage)
            yield f"  {stage:8} {key}  {_state(stage, key, workspace):8}  {text}"
        else:
            yield f"  {stage:8} {'?':12}  {'unknown':8}  {text}"
    if isinstance(keys, ConfigError):
        yield f"  keys are unknown until the documents can be read: {keys}"


def _state(stage: str, key: str, workspace: Workspace) -> str:
    folder = {"targets": workspace.targets, "base": workspace.drafter, "trained": workspace.drafter}
    directory = folder.get(stage, workspace.samples)(key)
    if read_manifest(directory) is not None:
        return "done"
    return "started" if directory.is_dir() and any(directory.iterdir()) else "to do"


def _training(stage: TrainingConfig) -> str:
    budgets = ", ".join("full" if b == FULL else str(b) for b in stage.views.budgets) if stage.lam else "none"
    lengths = ", ".join(f"{p}+{stage.continuation}" for p in stage.prefix_lengths)
    return (
        f"{stage.steps} steps x {_sequences(stage)}, tokens {lengths}, lambda {stage.lam:g}, sparse budgets {budgets}"
    )


def _documents(grid: GridConfig) -> int:
    return grid.prompts * len(grid.corpus)


def _grid(config: Config) -> Iterator[str]:
    grid, every = config.grid, cells(config.grid)
    spans = {
        GREEDY: f"{grid.new_tokens} tokens",
        SAMPLED: f"{grid.new_tokens} sampled tokens",
        REPLAY: f"{grid.replay_positions} replayed positions, {grid.replay_stride} tokens apart",
    }
    each = " or ".join(spans[workload] for workload in grid.workloads)
    yield f"grid: {len(every)} cells, {len(every) * _documents(grid)} samples of {each}"
    yield f"  contexts {', '.join(map(str, grid.contexts))}; at each, in cells:"
    for workload, method in product((*WRITTEN, REPLAY), grid.methods):
        here = [c for c in every if (c.context, c.workload, c.method) == (grid.contexts[0], workload, method)]
        if here:
            yield f"  {workload:7} {method:11} {len(here):3}  {_axes(here)}".rstrip()


def _axes(cells: list[Cell]) -> str:
    """What the cells of a method differ in."""
    axes = {
        "drafter": [cell.drafter for cell in cells if cell.drafter not in (None, *OWN_DRAFTERS)],
        "B": [_budget(cell.budget) for cell in cells if cell.drafter],
        "policy": [cell.policy for cell in cells if cell.budget != FULL],
        "positions": [cell.position_mode for cell in cells if cell.budget != FULL],
        "gamma": [str(cell.gamma) for cell in cells if cell.gamma],
        "temperature": [f"{cell.temperature:g}" for cell in cells if cell.temperature],
    }
    return " ".join(f"{name} {','.join(dict.fromkeys(values))}" for name, values in axes.items() if values)


def _budget(budget: int) -> str:
    return "full" if budget == FULL else str(budget)


def _costs(config: Config, runtime: Runtime, verifier: ModelShape, drafter: ModelShape) -> Iterator[str]:
    size = 4 if runtime.grid_dtype == "float32" else 2
    longest, every = _longest(config.grid), cells(config.grid)
    training = 16 * (drafter.body_parameters + drafter.head_parameters) + 4 * drafter.hidden * drafter.vocab
    # The library's own loop fills a cache of its own beside ours.
    caches = 2 if any(c.how.assisted for c in every) else 1
    measuring = size * (verifier.parameters + 2 * drafter.parameters) + caches * verifier.kv_bytes(longest, size)
    yield "estimated memory"
    yield f"  training   {_gib(training)} of weights, gradients and optimizer state, activations beside"
    yield f"  evaluation {_gib(measuring)} of weights and the verifier's cache at {longest} tokens"
    for name, keys in dict.fromkeys(_cached(c, longest) for c in every if c.drafter):
        yield f"  drafter's cache at {name}: {drafter.kv_bytes(keys, size) / 2**20:,.2f} MiB"
    for name, keys in dict.fromkeys(_cached(c, longest) for c in every if _drafts_for_itself(c)):
        sparse = verifier.kv_bytes(keys, size) / 2**20
        yield f"  verifier's cache at {name}, where it drafts for itself: {sparse:,.2f} MiB"
    seconds = _seconds(config, runtime, verifier, drafter)
    yield "estimated time (an order of magnitude from typical rates; progress shows the real one)"
    for stage, value in seconds.items():
        yield f"  {stage:10} {_duration(value)}"
    yield f"  {'together':10} {_duration(sum(seconds.values()))}"


def _seconds(config: Config, runtime: Runtime, verifier: ModelShape, drafter: ModelShape) -> dict[str, float]:
    cores = 1 if runtime.device == "cuda" else torch.get_num_threads()
    flops, bandwidth = _MATRIX_FLOPS[runtime.device] * cores, _BYTES_PER_S[runtime.device]
    targets, grid = config.targets, config.grid
    forced = targets.forced * verifier.flops(targets.length, targets.length // 2)
    generated = targets.generated * verifier.flops(targets.new_tokens, targets.prompt_tokens)
    # A backward costs twice a forward; L_C repeats the continuation.
    stages = [stage for stage in (config.base, config.training) if stage]
    learning = sum(
        3 * s.steps * _sequences(s) * drafter.flops(_mean(s.prefix_lengths) + s.continuation * (2 if s.lam else 1), 512)
        for s in stages
    )
    size = 4 if runtime.grid_dtype == "float32" else 2
    step = size * verifier.parameters / bandwidth
    written = [c for c in cells(grid) if c.workload in WRITTEN]
    prefill = sum(verifier.flops(c, c // 2) for c in grid.contexts) / flops if writes(grid) else 0
    # The library's own loop reads the prompt itself, in every cell.
    prefill += sum(verifier.flops(c.context, c.context // 2) for c in written if c.how.assisted) / flops
    # `ar` runs again beside every few cells; what the verifier drafts for itself costs a step of its own.
    decoding = (
        sum((1 + c.gamma * _drafts_for_itself(c)) * (1 + 1 / grid.ar_every) for c in written) * grid.new_tokens * step
    )
    return {
        "targets": (forced + generated) / flops,
        "training": learning / flops,
        "evaluation": _documents(grid) * (prefill + decoding + _replay_seconds(grid, verifier, drafter, flops, step)),
    }


def _cached(cell: Cell, longest: int) -> tuple[str, int]:
    """The budget of a cell's drafter in words, and the keys it stores per layer and head."""
    name, stored = f"B = {_budget(cell.budget)}", cell.policy in STORES_ALL
    if cell.budget == FULL:
        return name, longest
    return (f"{name}, every key stored", cell.budget + longest) if stored else (name, cell.budget)


def _drafts_for_itself(cell: Cell) -> bool:
    """Whether the verifier drafts, over a sparse cache; a small drafter before it only makes that cheaper."""
    return cell.drafter == SELF or cell.how.two_levels


def _replay_seconds(grid: GridConfig, verifier: ModelShape, drafter: ModelShape, flops: float, step: float) -> float:
    """One document: read once by the verifier and by every drafter's cache, then drafts and a verify per position."""
    if REPLAY not in grid.workloads:
        return 0.0
    caches = {
        (c.method, c.drafter, c.budget, c.policy, c.position_mode)
        for c in cells(grid)
        if c.workload == REPLAY and c.drafter
    }
    positions, length = len(all_positions(grid)), grid.longest
    windows = positions * verifier.flops(grid.far_window, grid.far_window // 2) if grid.far_window else 0.0
    reading = verifier.flops(length, length // 2) + len(caches) * drafter.flops(length, length // 2)
    # Reading on, then verifying; drafts mostly end at the first that is rejected.
    steps = 2 + len(caches) * (2 + max(grid.gammas) / 2) * drafter.parameters / verifier.parameters
    return (reading + windows) / flops + positions * steps * step


def _longest(grid: GridConfig) -> int:
    """Most tokens in the verifier's cache."""
    return max(grid.longest, max(grid.contexts) + (grid.new_tokens if writes(grid) else 0))


def _sequences(stage: TrainingConfig) -> int:
    """Sequences per step."""
    return stage.batch_size * stage.accumulate * stage.processes


def _mean(weights: dict[int, float]) -> int:
    return round(sum(k * w for k, w in weights.items()) / sum(weights.values()))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
