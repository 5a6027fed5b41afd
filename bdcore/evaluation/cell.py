"""One prompt measured under every cell of its context: `ar` first, then each method against it, as table rows.

The prompt is read once by the verifier; every method starts from that cache. A cell that fails is a row that says so.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from bdcore.config import Config
from bdcore.decoding.assisted import decode_assisted
from bdcore.decoding.cascade import Cascade
from bdcore.decoding.decoder import Prefilled, decode, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.lookup import Lookup
from bdcore.decoding.records import Decoded
from bdcore.decoding.sampling import GREEDY, Sampling
from bdcore.documents import Prompt
from bdcore.evaluation.grid import SAMPLED, WRITTEN, Cell
from bdcore.evaluation.rows import Bench, Row, decoded_row, failed_row, round_row
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan
from bdcore.runtime import seed_for


@dataclass
class _Timed:
    """A cell that was decoded, and how often `ar` had been timed before it."""

    cell: Cell
    decoded: Decoded
    before: int


Measured = tuple[list[Row], list[Row]]
"""Sample rows and round rows."""


def measure_prompt(
    bench: Bench,
    prompt: Prompt,
    cells: list[Cell],
    *,
    kept: Container[str] = (),
    on_cell: Callable[[Cell], None] = lambda cell: None,
    on_rows: Callable[[Measured], None] = lambda rows: None,
) -> Measured:
    """(sample rows, round rows) of one prompt under the cells of one context: each workload and temperature by itself,
    `ar` first. `ar` is timed again every few cells, so that a slow moment of the machine hits both sides of a ratio.

    `kept`: keys of cells that need no measuring; beside them `ar` is decoded again only where another is left.
    `on_rows` is told of new rows as soon as they are final, which is whenever `ar` has been timed again.
    """
    samples, rounds = list[Row](), list[Row]()
    reader = _Reader(bench, prompt, cells)
    for _, group in groupby(cells, key=lambda cell: (cell.workload, cell.temperature)):
        for found in _measure_group(bench, prompt, list(group), reader, kept, on_cell):
            on_rows(found)
            samples += found[0]
            rounds += found[1]
    return samples, rounds


class _Reader:
    """The prompt, read once by the verifier; read again after a failure, which may leave its cache in any state."""

    def __init__(self, bench: Bench, prompt: Prompt, cells: Sequence[Cell]) -> None:
        self.bench, self.prompt = bench, prompt
        self._gamma = max(cell.gamma for cell in cells)
        self._observe = bench.config.grid.window if any(cell.policy == "oracle" for cell in cells) else 0
        self._start: Prefilled | None = None

    def get(self) -> Prefilled:
        grid = self.bench.config.grid
        self._start = self._start or prefill(
            self.bench.verifier,
            self.prompt.ids,
            new_tokens=grid.new_tokens,
            gamma=self._gamma,
            chunk=grid.prefill_chunk,
            observe=self._observe,
        )
        return self._start

    def forget(self) -> None:
        self._start = None


def _measure_group(
    bench: Bench,
    prompt: Prompt,
    cells: list[Cell],
    reader: _Reader,
    kept: Container[str],
    on_cell: Callable[[Cell], None],
) -> Iterator[Measured]:
    assert cells[0].method == "ar", "ar comes first: the others are measured against it"
    left = [cell for cell in cells if cell.key not in kept]
    todo = [cells[0], *(cell for cell in left if cell is not cells[0])] if left else []
    for cell in cells:
        if cell not in todo:
            on_cell(cell)
    found: list[_Timed | tuple[Cell, Exception]] = []
    alone: list[Decoded] = []
    for i, cell in enumerate(todo):
        try:
            start = reader.get()
            if i and not alone:
                raise RuntimeError("`ar` failed on this prompt; nothing to compare with")
            decoded = _decode(bench, start, prompt, cell)
        except Exception as error:  # one failed cell must not stop the grid; the row carries the reason
            found.append((cell, error))
            reader.forget()
        else:
            alone += [decoded] if i == 0 else []
            found += [_Timed(cell, decoded, len(alone))] if cell in left else []
        on_cell(cell)
        if cell is todo[-1] or (i and i % bench.config.grid.ar_every == 0):
            if alone and i:
                with suppress(Exception):  # without it the cells before are compared with the timing before them
                    alone.append(_decode(bench, reader.get(), prompt, cells[0]))
            rows = [_rows(bench, prompt, entry, alone) for entry in found]
            yield [row for row, _ in rows], [record for _, records in rows for record in records]
            found = []


def _rows(
    bench: Bench, prompt: Prompt, entry: _Timed | tuple[Cell, Exception], alone: list[Decoded]
) -> tuple[Row, list[Row]]:
    if not isinstance(entry, _Timed):
        return failed_row(bench, prompt, *entry), []
    cell, decoded = entry.cell, entry.decoded
    around = [decoded] if cell.method == "ar" else alone[entry.before - 1 : entry.before + 1]
    row = decoded_row(bench, prompt, cell, decoded, alone[0], decode_s=sum(a.decode_s for a in around) / len(around))
    return row, [round_row(bench, prompt, cell, i, vars(record)) for i, record in enumerate(decoded.rounds)]


def warm_up(bench: Bench, prompt: Prompt, cells: Sequence[Cell]) -> None:
    """Decode a few tokens with every drafter once, so that the first cell measured does not pay for first calls."""
    short = replace(prompt, ids=prompt.ids[:64])
    reader = _Reader(bench, short, cells)
    for cell in {(cell.drafter, cell.how.assisted): cell for cell in cells if cell.workload in WRITTEN}.values():
        try:
            _decode(bench, reader.get(), short, cell, new_tokens=2)
        except Exception:  # what fails here fails again where it is measured, and leaves a row
            reader.forget()


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


def _drafter(bench: Bench, cell: Cell) -> Drafter | Lookup | Cascade | None:
    if cell.drafter is None:
        return Lookup() if cell.how.lookup else None
    drafter = bench.drafters[cell.drafter]
    return Cascade(drafter) if cell.how.two_levels else drafter


def _decode(bench: Bench, start: Prefilled, prompt: Prompt, cell: Cell, new_tokens: int | None = None) -> Decoded:
    grid, drafter = bench.config.grid, _drafter(bench, cell)
    rule, new_tokens = DraftRule(cell.gamma_mode, cell.gamma, grid.confidence), new_tokens or grid.new_tokens
    if cell.how.assisted:
        assert isinstance(drafter, Drafter), "assisted generation needs a model that drafts"
        return decode_assisted(
            bench.verifier, drafter, start.prompt, gamma=cell.gamma, new_tokens=new_tokens, eos=bench.eos
        )
    return decode(
        start,
        drafter,
        cell_plan(bench.config, cell) if cell.drafter else None,
        gamma=rule if drafter else 0,
        new_tokens=new_tokens,
        eos=bench.eos,
        sampling=Sampling(cell.temperature, grid.top_k, grid.top_p) if cell.workload == SAMPLED else GREEDY,
        seed=seed_for(bench.config.seed, cell.workload, prompt.doc_id),
    )
