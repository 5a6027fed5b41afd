"""One prompt measured under every cell of its context: `ar` first, then each method against it, as table rows.

The prompt is read once by the verifier; every method starts from that cache. A cell that fails is a row that says so.
"""

from collections.abc import Callable

from bdcore.config import Config
from bdcore.decoding.decoder import Prefilled, decode, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.lookup import Lookup
from bdcore.decoding.records import Decoded
from bdcore.documents import Prompt
from bdcore.evaluation.grid import Cell
from bdcore.evaluation.rows import Bench, Row, decoded_row, failed_row, round_row
from bdcore.models.stepper import CachePlan
from bdcore.runtime import seed_for


def measure_prompt(
    bench: Bench, prompt: Prompt, cells: list[Cell], *, on_cell: Callable[[Cell], None] | None = None
) -> tuple[list[Row], list[Row]]:
    """(sample rows, round rows) of one prompt under the cells of one context, the first of which is `ar`."""
    grid = bench.config.grid
    assert cells[0].method == "ar", "ar comes first: the others are measured against it"
    samples, rounds = list[Row](), list[Row]()
    start, alone = None, None
    for cell in cells:
        try:
            if start is None:
                most = max(cell.gamma for cell in cells)
                start = prefill(
                    bench.verifier,
                    prompt.ids,
                    new_tokens=grid.new_tokens,
                    gamma=most,
                    chunk=grid.prefill_chunk,
                    observe=grid.window if any(cell.policy == "oracle" for cell in cells) else 0,
                )
            decoded = _decode(bench, start, cell)
            alone = decoded if cell.method == "ar" else alone
            if alone is None:
                raise RuntimeError("`ar` failed on this prompt; nothing to compare with")
            samples.append(decoded_row(bench, prompt, cell, decoded, alone))
            rounds += [round_row(bench, prompt, cell, i, r) for i, r in enumerate(decoded.rounds)]
        except Exception as error:  # one failed cell must not stop the grid; the row carries the reason
            samples.append(failed_row(bench, prompt, cell, error))
            start = None  # its caches may be in any state
        if on_cell:
            on_cell(cell)
    return samples, rounds


def cache_plan(config: Config, *, budget: int, policy: str, position_mode: str) -> CachePlan:
    """How a study keeps its drafter's cache at a budget, in the grid and for a single prompt."""
    return CachePlan(
        capacity=0,
        budget=budget,
        selection=config.grid.selection(policy, seed_for(config.seed, "policy")),
        position_mode=position_mode,
        prefill_chunk=config.grid.prefill_chunk,
        extrapolate=config.drafter.beyond_positions == "extrapolate",
        refresh=config.grid.refresh,
    )


def cell_plan(config: Config, cell: Cell) -> CachePlan:
    """The cache of a cell's drafter."""
    return cache_plan(config, budget=cell.budget, policy=cell.policy, position_mode=cell.position_mode)


def _decode(bench: Bench, start: Prefilled, cell: Cell) -> Decoded:
    new_tokens = bench.config.grid.new_tokens
    rule = DraftRule(cell.gamma_mode, cell.gamma, bench.config.grid.confidence)
    if cell.drafter is not None:
        plan = cell_plan(bench.config, cell)
        return decode(start, bench.drafters[cell.drafter], plan, gamma=rule, new_tokens=new_tokens, eos=bench.eos)
    lookup = Lookup() if cell.lookup else None
    return decode(start, lookup, gamma=rule if lookup else 0, new_tokens=new_tokens, eos=bench.eos)
