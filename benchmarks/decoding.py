"""Decoding speed against transformers, interleaved in one process: ratios of medians, phases, memory, the limit.

    python benchmarks/decoding.py --quick                      # under 10 minutes on two CPU cores
    python benchmarks/decoding.py                              # everything
    python benchmarks/decoding.py --device cuda --pair paper   # random weights of the paper's shapes, half precision

Every context is read once; all systems start from copies of that cache, so a run is decoding alone. The last line
printed is one JSON object of ratios, keyed by dtype and context; above 1 is in our favour where the name says `vs` a
peer. Rows go to Parquet, the figure to SVG.
"""

import argparse
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bdcore.decoding.decoder import Prefilled
from bdcore.kv.budget import Selection
from bdcore.models.drafter import Drafter
from bdcore.models.shape import from_config
from bdcore.models.stepper import CachePlan, Stepper
from bdcore.runtime import environment, torch_dtype
from benchmarks import figure, pairs, peers
from benchmarks.peers import Run

Row = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("kind", pa.string()),  # run: one generation; step: one forward
        ("dtype", pa.string()),
        ("context", pa.int32()),
        ("system", pa.string()),
        ("budget", pa.int32()),  # -1: full cache
        ("block", pa.int32()),  # tokens of a step
        ("repeat", pa.int32()),
        ("seconds", pa.float64()),  # per new token of a run, per step
        ("tokens", pa.int32()),
        ("rounds", pa.int32()),
        ("drafted", pa.int32()),
        ("accepted", pa.int32()),
        ("draft_s", pa.float64()),
        ("verify_s", pa.float64()),
        ("select_s", pa.float64()),
        ("overhead_s", pa.float64()),
        ("models_s", pa.float64()),  # inside the two models' forwards
        ("equal", pa.bool_()),  # same tokens as transformers' generate
        ("verifier_kv_bytes", pa.int64()),
        ("drafter_kv_bytes", pa.int64()),
        ("rss_bytes", pa.int64()),
        ("limit_s", pa.float64()),  # bytes a step must read over the measured copy rate
    ]
)


@dataclass(frozen=True)
class Options:
    pair: str
    device: str
    dtypes: list[str]
    contexts: list[int]
    budgets: list[int]
    gamma: int
    new_tokens: int
    repeats: int
    steps: int
    drafter: str | None
    out: Path

    @property
    def block(self) -> int:
        return self.gamma + 1


class Clock:
    """Seconds inside the models' forwards, by hooks: what is left of a round is ours."""

    def __init__(self, *models: Any) -> None:
        self.seconds, self._begun = 0.0, 0.0
        for model in {id(m): m for m in models}.values():
            model.register_forward_pre_hook(self._enter)
            model.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        peers.synchronize()
        self._begun = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        peers.synchronize()
        self.seconds += time.perf_counter() - self._begun

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def copy_rate(device: str) -> float:
    """Bytes per second read and written by a plain copy of 256 MiB: the median of nine."""
    source = torch.ones(64 * 2**20, device=device)
    target, times = torch.empty_like(source), list[float]()
    for _ in range(9):
        peers.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        peers.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that one step reads: all but an untied embedding, of which it reads a row."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    untied = model.get_input_embeddings().weight is not model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    return total - untied * embedding.numel() * embedding.element_size()


def plan(options: Options, budget: int) -> CachePlan:
    return CachePlan(0, budget, Selection("attention_mass"), block=options.block, extrapolate=True)


class Bench:
    """One dtype: both models, ours and transformers', over prompts that were read once."""

    def __init__(self, options: Options, dtype: str, rate: float) -> None:
        self.options, self.dtype, self.rate = options, dtype, rate
        kind = torch_dtype(dtype)
        self.pair = pairs.load(options.pair, options.device, kind, options.drafter)
        self.clock = Clock(self.pair.verifier, self.pair.drafter.model)
        self.rows: list[Row] = []

    def context(self, context: int, prompt: list[int], read: Stepper, draft_read: Stepper) -> None:
        options = self.options
        reference: list[int] = []
        start = peers.ours_from(read, self.pair.verifier, prompt, new_tokens=options.new_tokens, block=options.block)
        systems = self._systems(start, prompt, read, draft_read)
        for repeat in range(options.repeats):
            for (system, budget), run in systems.items():
                result = run()
                reference = reference or result.tokens
                self.rows.append(
                    self._run_row(context, system, budget, repeat, result, equal=result.tokens == reference)
                )
                say(f"{self.dtype} {context} {system} {budget}: {result.seconds_per_token * 1e3:.1f} ms per token")
        self._verify_steps(context, prompt, start, read)

    def _systems(
        self, start: Prefilled, prompt: list[int], read: Stepper, draft_read: Stepper
    ) -> dict[tuple[str, int], Callable[[], Run]]:
        o, pair = self.options, self.pair
        common = {"new_tokens": o.new_tokens}

        def ours(drafter: Drafter | None, budget: int) -> Callable[[], Run]:
            gamma = o.gamma if drafter else 0
            return lambda: peers.ours(start, drafter, plan(o, budget), gamma=gamma, begin=self.clock.take, **common)

        return {
            ("generate", -1): lambda: peers.generate(pair.plain, read, prompt, **common),
            ("ar", -1): ours(None, -1),
            ("assisted", -1): lambda: peers.assisted(
                pair.plain, pair.plain_drafter, read, draft_read, prompt, gamma=o.gamma, **common
            ),
            ("sd_full", -1): ours(pair.drafter, -1),
            ("lookup", -1): lambda: peers.generate(
                pair.plain, read, prompt, prompt_lookup_num_tokens=o.gamma, **common
            ),
            **{("budgetdraft", b): ours(pair.drafter, b) for b in o.budgets},
        }

    def _run_row(self, context: int, system: str, budget: int, repeat: int, run: Run, *, equal: bool) -> Row:
        rounds = run.decoded.rounds if run.decoded else []
        phases = ("drafted", "accepted", "draft_s", "verify_s", "select_s", "overhead_s")
        sums = {name: sum(getattr(r, name) for r in rounds) if rounds else None for name in phases}
        return {
            **dict.fromkeys(SCHEMA.names),
            **sums,
            "kind": "run",
            "dtype": self.dtype,
            "context": context,
            "system": system,
            "budget": budget,
            "repeat": repeat,
            "seconds": run.seconds_per_token,
            "tokens": len(run.tokens),
            "rounds": len(rounds) or None,
            "models_s": self.clock.take() if rounds else None,
            "equal": equal,
            "verifier_kv_bytes": run.decoded.verifier_kv_bytes if run.decoded else None,
            "drafter_kv_bytes": run.decoded.drafter_kv_bytes if run.decoded else None,
            "rss_bytes": psutil.Process().memory_info().rss,
        }

    def _verify_steps(self, context: int, prompt: list[int], start: Prefilled, read: Stepper) -> None:
        """Forwards of one and of gamma + 1 tokens, ours and transformers', interleaved."""
        cache = peers.dynamic_from(read, self.pair.plain, len(prompt) - 1)
        forwards: dict[tuple[str, int, int, int], Callable[[], Any]] = {}
        for block in (1, self.options.block):
            ids = torch.tensor([prompt[-block:]], device=self.options.device)
            forwards["verify", context, -1, block] = lambda ids=ids: _fed(start.stepper, ids)
            forwards["verify_transformers", context, -1, block] = lambda ids=ids: _fed_plain(
                self.pair.plain, cache, ids
            )
        self._time(forwards)

    def draft_steps(self, prompts: dict[int, list[int]]) -> None:
        """A drafter's step at each budget and context: all in one loop, so that a slow moment hits every context."""
        forwards: dict[tuple[str, int, int, int], Callable[[], Any]] = {}
        for budget in self.options.budgets:
            for context, prompt in prompts.items():
                stepper = self._drafter_at(prompt, budget)
                ids = torch.tensor([prompt[-1:]], device=self.options.device)
                forwards["draft", context, budget, 1] = lambda s=stepper, ids=ids: _fed(s, ids)
        self._time(forwards)

    def _time(self, forwards: dict[tuple[str, int, int, int], Callable[[], Any]]) -> None:
        for repeat in range(self.options.steps + 1):
            for (system, context, budget, block), forward in forwards.items():
                seconds = _timed(forward)
                if repeat:  # the first touches memory for the first time
                    self.rows.append(self._step_row(context, system, budget, block, repeat - 1, seconds))

    def _drafter_at(self, prompt: list[int], budget: int) -> Stepper:
        stepper = Stepper(self.pair.drafter.model, plan(self.options, budget))
        stepper.prefill(prompt)
        stepper.fit()
        return stepper

    def _step_row(self, context: int, system: str, budget: int, block: int, repeat: int, seconds: float) -> Row:
        model = self.pair.drafter.model if system == "draft" else self.pair.verifier
        keys = context if budget < 0 else min(budget, context)
        kv = from_config(model.config).kv_bytes(keys, model.dtype.itemsize)
        return {
            **dict.fromkeys(SCHEMA.names),
            "kind": "step",
            "dtype": self.dtype,
            "context": context,
            "system": system,
            "budget": budget,
            "block": block,
            "repeat": repeat,
            "seconds": seconds,
            "limit_s": (weight_bytes(model) + kv) / self.rate,
        }


def _timed(call: Callable[[], Any]) -> float:
    peers.synchronize()
    start = time.perf_counter()
    call()
    peers.synchronize()
    return time.perf_counter() - start


def _fed(stepper: Stepper, ids: torch.Tensor) -> None:
    stepper.feed(ids)
    stepper.rollback(ids.shape[1])


@torch.inference_mode()
def _fed_plain(model: Any, cache: Any, ids: torch.Tensor) -> None:
    model(ids, cache=cache, use_cache=True)
    cache.crop(-ids.shape[1])


def ratios(rows: list[Row], options: Options) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of the last line, each {dtype: {context: ratio of medians}}."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    widest, first = max(options.budgets), min(options.contexts, key=lambda c: abs(c - 1024))

    def seconds(kind: str, dtype: str, context: int, system: str, block: int | None = None, budget: int = -1) -> float:
        wanted = (kind, dtype, context, system, budget, block)
        keys = ("kind", "dtype", "context", "system", "budget", "block")
        return statistics.median(r["seconds"] for r in rows if tuple(r[k] for k in keys) == wanted)

    def note(name: str, dtype: str, context: int, value: float) -> None:
        out.setdefault(name, {}).setdefault(dtype, {})[str(context)] = round(value, 3)

    for dtype in options.dtypes:
        for c in options.contexts:
            ours = seconds("run", dtype, c, "ar")
            note("ar_vs_generate", dtype, c, seconds("run", dtype, c, "generate") / ours)
            block = {n: seconds("step", dtype, c, "verify", n) for n in (1, options.block)}
            theirs = seconds("step", dtype, c, "verify_transformers", options.block)
            note("verify5_vs_1", dtype, c, block[options.block] / block[1])
            note("verify5_vs_transformers", dtype, c, theirs / block[options.block])
            full = seconds("run", dtype, c, "sd_full")
            note("sd_vs_assisted", dtype, c, seconds("run", dtype, c, "assisted") / full)
            note("overhead_share", dtype, c, _overhead(rows, dtype, c, widest))
            if c != first:
                step = {at: seconds("step", dtype, at, "draft", 1, widest) for at in (first, c)}
                note("draft_step_8k_vs_1k", dtype, c, step[c] / step[first])
    return out


def _overhead(rows: list[Row], dtype: str, context: int, budget: int) -> float:
    """Share of our rounds outside both models' forwards: selection, bookkeeping, choosing tokens."""
    mine = [
        r
        for r in rows
        if (r["system"], r["dtype"], r["context"], r["budget"]) == ("budgetdraft", dtype, context, budget)
        and r["kind"] == "run"
    ]
    shares = [1 - r["models_s"] / sum(r[p] for p in ("draft_s", "verify_s", "select_s", "overhead_s")) for r in mine]
    return statistics.median(shares)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _BEGUN:6.0f} s] {text}", flush=True)


_BEGUN = time.perf_counter()


def main(argv: list[str] | None = None) -> dict[str, Any]:
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rate = copy_rate(options.device)
    say(f"copy rate {rate / 1e9:.1f} GB/s; {json.dumps(environment(), default=str)}")
    prompts = pairs.prompts(options.pair, options.contexts, options.new_tokens + options.block)
    reading = pairs.reading_dtype(options.device, options.dtypes)
    reader = pairs.load(options.pair, options.device, reading, options.drafter)
    benches = {dtype: Bench(options, dtype, rate) for dtype in options.dtypes}
    say(f"reading {max(prompts)} tokens; shorter contexts are its beginnings")
    read, draft_read = (
        peers.read_prompt(model, prompts[max(prompts)], block=options.block, chunk=512)
        for model in (reader.verifier, reader.drafter.model)
    )
    del reader
    for context, prompt in prompts.items():
        for bench in benches.values():
            bench.context(context, prompt, read, draft_read)
            gc.collect()
    for bench in benches.values():
        bench.draft_steps(prompts)
    rows = [row for bench in benches.values() for row in bench.rows]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), options.out / "decoding.parquet", compression="zstd")
    figure.draw(rows, options.gamma, options.out / "decoding.svg")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say(f"rows and figure in {options.out}; peak memory of the process {peak / 2**30:.2f} GiB")
    figure.print_tables(rows)
    result = ratios(rows, options)
    print(json.dumps(result))
    return result


def _options(argv: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three contexts, one budget, few repeats")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--pair", choices=sorted(pairs.PAIRS), default="embedded", help="models to decode with")
    parser.add_argument("--drafter", help="folder of a trained drafter (default: an untrained slice of the verifier)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--contexts", nargs="+", type=int, help="prompt lengths in tokens")
    parser.add_argument("--budgets", nargs="+", type=int, help="keys of the sparse drafter")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted per round")
    parser.add_argument("--new-tokens", type=int, help="tokens per generation")
    parser.add_argument("--repeats", type=int, help="generations of each system per context")
    parser.add_argument("--out", type=Path, default=Path("workspace/benchmarks"), help="folder for rows and figure")
    given = parser.parse_args(argv)
    device = given.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = pairs.PAIRS[given.pair]
    quick = given.quick
    return Options(
        pair=given.pair,
        device=device,
        dtypes=given.dtypes or (["float16", "bfloat16"] if given.pair == "paper" else ["float32", "bfloat16"]),
        contexts=sorted(given.contexts or (shape.quick_contexts if quick else shape.contexts)),
        budgets=given.budgets or ([256] if quick else [64, 256, 1024]),
        gamma=given.gamma,
        new_tokens=given.new_tokens or (16 if quick else 32),
        repeats=given.repeats or (2 if quick else 5),
        steps=15 if quick else 25,
        drafter=given.drafter,
        out=given.out,
    )


if __name__ == "__main__":
    main()
