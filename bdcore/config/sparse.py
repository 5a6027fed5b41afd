"""How a sparse cache is chosen."""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from bdcore.config.section import Section
from bdcore.kv.budget import READS_AHEAD, STORES_ALL, Selection, check_budget, parse_budget

Budget = Annotated[int, BeforeValidator(parse_budget)]
Policy = Literal[
    "attention_mass",
    "attention_ahead",
    "retrieval",
    "retrieval_ahead",
    "last_key",
    "sink_recent",
    "random",
    "oracle",
    "no_sinks",
    "no_recent",
]
PositionMode = Literal["absolute", "in_cache"]


class SparseConfig(Section):
    """How a sparse cache is chosen, the same for training views and for the grid.

    Policies. `attention_mass`: chunks with most attention of the newest queries (the paper). `attention_ahead`: a chunk
    counts as much as the one before it. `retrieval`, `retrieval_ahead` (grid only): the same two, chosen before every
    round from all keys, which stay stored: the budget bounds what is read. `last_key`: the authors' code.
    `sink_recent`: StreamingLLM. `oracle` (grid only): chunks the verifier attends to. Controls: `random`; `no_sinks`
    and `no_recent` are `attention_mass` without the sinks, and without the newest quarter of the budget.
    Position modes. `absolute`: kept keys keep their positions (the paper). `in_cache`: re-rotated to 0..n-1.
    """

    chunk: PositiveInt = 8
    """Tokens per chunk of the prefix."""
    sinks: int = Field(default=8, ge=0)
    """First tokens that are always kept."""
    recent: int = Field(default=8, ge=0)
    """Newest tokens that are always kept (`sink_recent` fills the whole budget with them)."""
    window: PositiveInt = 8
    """Newest queries whose attention scores the chunks."""

    def check(self, policies: Iterable[str], budgets: Iterable[int]) -> None:
        if {"attention_mass", *READS_AHEAD, *STORES_ALL}.intersection(policies) and self.window > self.recent:
            raise ValueError(
                f"window = {self.window} > recent = {self.recent}: the observed queries' own keys must stay"
            )
        for budget in budgets:
            check_budget(budget, chunk=self.chunk, sinks=self.sinks, recent=self.recent)

    def selection(self, policy: str, seed: int) -> Selection:
        return Selection(policy, self.chunk, self.sinks, self.recent, self.window, seed)
