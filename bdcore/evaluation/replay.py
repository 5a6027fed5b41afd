"""The workload `replay`: drafts along human text, checked by the verifier's greedy choices, then on along the text.

At position p the drafter has read all but the last of the first p tokens, as in decoding, and drafts the longest of the
grid's draft lengths. Drafting is greedy, so a shorter length accepts min(accepted, length) of the same chain. Every
configuration walks the document in lockstep with one pass of the verifier.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from bdcore.config import GridConfig
from bdcore.documents import Prompt
from bdcore.evaluation.cell import cell_plan
from bdcore.evaluation.drafts import Drafts, LookupDrafts, ModelDrafts
from bdcore.evaluation.grid import Cell
from bdcore.evaluation.places import Evidence, token_class
from bdcore.evaluation.rows import Bench, Row, failed_row, identity, round_row
from bdcore.evaluation.truth import Known, Truth


def positions_of(grid: GridConfig, context: int) -> range:
    """Where a context's drafts start: the numbers of tokens before them."""
    return range(context, context + grid.replay_positions * grid.replay_stride, grid.replay_stride)


def all_positions(grid: GridConfig) -> list[int]:
    """The positions of every context, each once, ascending. Contexts may overlap."""
    return sorted({position for context in grid.contexts for position in positions_of(grid, context)})


def replay(
    bench: Bench,
    document: Prompt,
    cells: list[Cell],
    *,
    known: Known | None = None,
    on_position: Callable[[], None] | None = None,
) -> tuple[list[Row], list[Row]]:
    """(one sample row per cell, one round row per cell and position), all of the workload `replay`.

    The document has the tokens of `grid.longest`.

    `known`: what the verifier says of this document with this `far_window`, from another study; it is added to. A
    configuration that raises fails at the contexts it had not finished; the others go on.
    """
    grid, gamma = bench.config.grid, max(cell.gamma for cell in cells)
    walks = {_setting(cell): Walk(bench, document.ids, cell, gamma) for cell in cells}
    evidence, places = Evidence(document.ids), dict[int, Row]()
    try:
        truth = Truth(
            bench.verifier,
            document.ids,
            all_positions(grid),
            gamma=gamma,
            chunk=grid.prefill_chunk,
            observe=grid.window if any(cell.policy == "oracle" for cell in cells) else 0,
            far_window=grid.far_window,
            known=known,
        )
        for position in truth.positions:
            truth.read(position)
            places[position] = {
                "position": position,
                "token_class": token_class(bench.tokenizer.decode([truth.choice])),
                "evidence": evidence.distance(position, truth.choice),
                "far": truth.far if grid.far_window is not None else None,
            }
            contexts = [context for context in grid.contexts if position in positions_of(grid, context)]
            for walk in walks.values():
                walk.visit(position, contexts, truth)
            if on_position:
                on_position()
    except Exception as error:  # the verifier's: nobody can go on
        for walk in walks.values():
            walk.stop(error)
    samples = [_row(bench, document, cell, walks[_setting(cell)]) for cell in cells]
    done = [cell for cell, row in zip(cells, samples, strict=True) if row["status"] == "ok"]
    return samples, [row for cell in done for row in _rounds(bench, document, cell, walks[_setting(cell)], places)]


@dataclass
class Tally:
    """What one configuration did at the positions of one context, in their order."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    far: list[bool] = field(default_factory=list)
    cached_peak: int = 0
    kv_bytes: int = 0


class Walk:
    """One configuration along a document: a drafter and its cache, and what became of its drafts by context."""

    def __init__(self, bench: Bench, ids: list[int], cell: Cell, gamma: int) -> None:
        self.bench, self.ids, self.cell, self.gamma = bench, ids, cell, gamma
        self.tallies: dict[int, Tally] = {}
        self.error: Exception | None = None
        self._drafts: Drafts | None = None

    def visit(self, position: int, contexts: list[int], truth: Truth) -> None:
        """Draft at the position and count it for these contexts. An error of the drafter's own ends the walk."""
        if self.error is not None:
            return
        try:
            self._drafts = self._drafts or self._begin(truth)
            tokens, drafted = self._drafts.at(position, truth.choice)
        except Exception as error:  # one failed configuration must not stop the others; its rows carry the reason
            self.stop(error)
            return
        accepted = truth.accepted(tokens)
        for context in contexts:
            tally = self.tallies.setdefault(context, Tally())
            tally.drafted.append(drafted)
            tally.accepted.append(accepted)
            tally.far.append(truth.far)
            tally.cached_peak, tally.kv_bytes = self._drafts.cached_peak, self._drafts.kv_bytes

    def stop(self, error: Exception) -> None:
        """Give up, for the first error given; frees the cache."""
        self.error, self._drafts = self.error or error, None

    def _begin(self, truth: Truth) -> Drafts:
        if self.cell.drafter is None:
            return LookupDrafts(self.ids, self.gamma)
        drafter = self.bench.drafters[self.cell.drafter]
        return ModelDrafts(drafter, cell_plan(self.bench.config, self.cell), self.ids, self.gamma, truth.oracle)


def _setting(cell: Cell) -> tuple[str, str | None, int, str, str]:
    """What one walk serves: all contexts and draft lengths of it."""
    return cell.method, cell.drafter, cell.budget, cell.policy, cell.position_mode


def _rounds(bench: Bench, document: Prompt, cell: Cell, walk: Walk, places: Mapping[int, Row]) -> Iterator[Row]:
    tally = walk.tallies[cell.context]
    positions = positions_of(bench.config.grid, cell.context)
    for index, position in enumerate(positions):
        drafted, accepted = (min(counts[index], cell.gamma) for counts in (tally.drafted, tally.accepted))
        record = {"drafted": drafted, "accepted": accepted, "emitted": accepted + 1}
        yield round_row(bench, document, cell, index, {**record, **places[position]})


def _row(bench: Bench, document: Prompt, cell: Cell, walk: Walk) -> Row:
    grid, tally = bench.config.grid, walk.tallies.get(cell.context, Tally())
    if len(tally.drafted) < grid.replay_positions:
        assert walk.error is not None, "a walk that did not end must have an error"
        return failed_row(bench, document, cell, walk.error)
    drafted, accepted = ([min(n, cell.gamma) for n in counts] for counts in (tally.drafted, tally.accepted))
    first = [n > 0 for n in accepted]
    far = grid.far_window is not None
    return {
        **identity(bench, document, cell),
        "rounds": len(drafted),
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "drafted_at": [sum(n > i for n in drafted) for i in range(cell.gamma)],
        "accepted_at": [sum(n > i for n in accepted) for i in range(cell.gamma)],
        "far_window": grid.far_window,
        "far_rounds": sum(tally.far) if far else None,
        "far_accepted": sum(f and a for f, a in zip(tally.far, first, strict=True)) if far else None,
        "drafter_cached_peak": tally.cached_peak,
        "drafter_kv_bytes_peak": tally.kv_bytes,
        "status": "ok",
    }
