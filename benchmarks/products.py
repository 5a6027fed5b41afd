"""The two kernels of a decode step on this machine: linear products and attention, ours against the library's.

    python benchmarks/products.py

Ratios above 1 are in our favour: the library's median time over ours, measured in turn in one loop. Weights and caches
are read from memory, not from the processor's cache, as in a model of many layers.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from bdcore.kv import attention
from bdcore.models.linear import BlockLinear

SHAPES = {"gate, up": (1536, 576), "down": (576, 1536), "query": (576, 576), "head": (49152, 576)}
TOKENS = (1, 2, 3, 5, 9, 17, 64)
KEYS = (1024, 4096, 8192)
HEADS, GROUP, DIM = 3, 3, 64
MEMORY = 160 * 2**20


def in_turn(calls: dict[str, Callable[[], Any]], repeats: int = 9) -> dict[str, float]:
    """Median seconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def linear(dtype: torch.dtype, shape: tuple[int, int], tokens: int) -> float:
    count = max(1, MEMORY // (shape[0] * shape[1] * dtype.itemsize))
    ours = [BlockLinear(shape[1], shape[0], bias=False, dtype=dtype) for _ in range(count)]
    x = torch.randn(tokens, shape[1]).to(dtype)
    found = in_turn({"ours": lambda: [m(x) for m in ours], "library": lambda: [F.linear(x, m.weight) for m in ours]})
    return found["library"] / found["ours"]


def attend(dtype: torch.dtype, keys: int, tokens: int) -> tuple[float, float]:
    """(library over ours, one read over two halves)."""
    count = max(2, MEMORY // (2 * HEADS * keys * DIM * dtype.itemsize))
    caches = [[torch.randn(1, HEADS, keys + 300, DIM).to(dtype)[:, :, :keys] for _ in range(2)] for _ in range(count)]
    query = torch.randn(1, HEADS * GROUP, tokens, DIM).to(dtype)
    mask = None if tokens == 1 else attention.causal_block_mask(tokens, keys, query.device)

    def library() -> None:
        for k, v in caches:  # as transformers does: the cache concatenated, then sdpa
            k, v = (torch.cat([t[:, :, :-tokens], t[:, :, -tokens:]], 2) for t in (k, v))
            F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=DIM**-0.5, enable_gqa=True)

    def ours(split_from: int) -> None:
        attention.SPLIT_FROM = split_from
        for k, v in caches:
            attention.grouped_attention(query, k, v, DIM**-0.5)

    default = attention.SPLIT_FROM
    calls = {"library": library, "ours": lambda: ours(default), "whole": lambda: ours(10**9), "halves": lambda: ours(1)}
    found = in_turn(calls, repeats=5)
    attention.SPLIT_FROM = default
    return found["library"] / found["ours"], found["whole"] / found["halves"]


@torch.inference_mode()
def main() -> None:
    console, result = Console(width=120), {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        table = Table("weight", *(f"{n} tokens" for n in TOKENS), title=f"linear, {name}: library / ours")
        for label, shape in SHAPES.items():
            ratios = [linear(dtype, shape, n) for n in TOKENS]
            result[f"linear {name} {label}"] = dict(zip(map(str, TOKENS), (round(r, 2) for r in ratios), strict=True))
            table.add_row(f"{label} {shape[0]} x {shape[1]}", *(f"{r:.2f}" for r in ratios))
        console.print(table)
        table = Table("keys", "tokens", "library / ours", "whole / halves", title=f"attention, {name}")
        for keys in KEYS:
            for tokens in (1, 5):
                pair = attend(dtype, keys, tokens)
                result[f"attention {name} {keys} x{tokens}"] = [round(r, 2) for r in pair]
                table.add_row(str(keys), str(tokens), *(f"{r:.2f}" for r in pair))
        console.print(table)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
