"""The evaluation grid."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, NonNegativeInt, PositiveInt, model_validator

from bdcore.config.corpus import Corpora, CorpusConfig
from bdcore.config.section import listed
from bdcore.config.sparse import Budget, Policy, PositionMode, SparseConfig
from bdcore.kv.budget import FULL, parse_budget

GammaMode = Literal["fixed", "confidence", "adaptive"]
MethodName = Literal[
    "ar", "ngram", "sd_full", "hf_assisted", "sd_sparse", "streaming", "self_sparse", "triforce", "budgetdraft"
]
Workload = Literal["greedy", "sampled", "replay"]
CellField = Literal[
    "method", "workload", "context", "budget", "policy", "position_mode", "gamma", "drafter", "temperature"
]
Exclusion = dict[CellField, list[Any]]
OWN_DRAFTERS = ("base", "trained", "self")
"""Names of drafters that a study has without naming them."""


def _exclusion(value: Any) -> Any:
    """An exclusion with every value listed, and budgets as numbers."""
    if not isinstance(value, dict):
        return value
    lists = {name: listed(found) for name, found in value.items()}
    return {n: [parse_budget(v) for v in found] if n == "budget" else found for n, found in lists.items()}


_AXES = (
    "corpus",
    "workloads",
    "temperatures",
    "methods",
    "contexts",
    "budgets",
    "policy",
    "position_mode",
    "gammas",
)


class GridConfig(SparseConfig):
    """The evaluation grid: workloads x methods x contexts x policies x position modes x budgets x gammas, on the same
    prompts."""

    corpus: Corpora = [CorpusConfig(split="test")]
    """One corpus or several; each gives `prompts` documents."""
    workloads: Annotated[list[Workload], BeforeValidator(listed)] = ["greedy"]
    """`greedy`: the verifier's greedy continuation of a prompt (the paper's). `sampled`: one drawn at each of
    `temperatures`. `replay`: along human text; at spaced positions drafts are checked against the verifier's greedy
    choices, then the text goes on. Replay cannot loop."""
    temperatures: list[Annotated[float, Field(ge=1e-4)]] = [1.0]
    """Temperatures of the workload `sampled`."""
    top_k: NonNegativeInt = 0
    """`sampled`: draw among this many most probable tokens; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """`sampled`: draw among the most probable tokens that together reach this probability."""
    methods: list[MethodName] = ["ar", "sd_full", "sd_sparse", "budgetdraft"]
    drafters: dict[str, str] = {}
    """More drafters for `budgetdraft` beside the study's own, name -> checkpoint folder or hub id."""
    contexts: list[PositiveInt] = [3800, 8192, 16384]
    """Prompt lengths."""
    budgets: list[Budget] = [256, 512, 1024, 2048]
    """Keys the drafter may cache per layer and head; `full` (-1) is legal for `budgetdraft`."""
    budget_bytes: list[ByteSize] = []
    """Budgets stated as memory of the drafter's whole cache, block in flight included, such as 8MiB; become keys."""
    policy: Annotated[list[Policy], BeforeValidator(listed)] = ["attention_mass"]
    """Policies by which a sparse cache is chosen."""
    position_mode: Annotated[list[PositionMode], BeforeValidator(listed)] = ["absolute"]
    """Position modes of a sparse cache. A full cache is always absolute."""
    refresh: int = Field(default=0, ge=0)
    """Rounds after which a sparse cache is chosen anew from all tokens so far; 0: never."""
    gammas: list[PositiveInt] = [5]
    """Draft lengths: the most a round drafts."""
    gamma_mode: GammaMode = "fixed"
    """`fixed`; `confidence`: stop drafting where the drafter is unsure; `adaptive`: the length that measured acceptance
    and costs make fastest, 0 where speculation cannot win."""
    confidence: float = Field(default=0.4, ge=0, le=1)
    """`gamma_mode = confidence`: the drafter's best probability below which it stops."""
    prompts: PositiveInt = 9
    """Documents per corpus and context."""
    new_tokens: PositiveInt = 256
    """Tokens of a greedy continuation."""
    replay_positions: PositiveInt = 32
    """Positions per context and document at which a replay drafts."""
    replay_stride: PositiveInt = 8
    """Tokens of the document between them."""
    far_window: PositiveInt | None = None
    """Replay: also tells far-dependent tokens, whose greedy choice changes when the verifier sees its newest this many
    tokens alone, and acceptance on them. Takes the verifier one forward of that length per position."""
    exclude: list[Annotated[Exclusion, BeforeValidator(_exclusion)]] = []
    """Cells to leave out: those that meet every entry of one of these, such as {method: sd_full, context: [4096]}."""
    ar_every: PositiveInt = 4
    """Cells after which `ar` is timed again: each cell is compared with the mean of `ar` before and after it."""
    prefill_chunk: PositiveInt = 512
    """Tokens fed at once while reading a prompt with the full cache. A sparse drafter reads a quarter of its budget."""

    @model_validator(mode="after")
    def _legal(self) -> "GridConfig":
        for name in _AXES:
            values = getattr(self, name)
            empty = not values and not (name == "budgets" and self.budget_bytes)
            if empty or any(value in values[:i] for i, value in enumerate(values)):
                raise ValueError(f"{name} = {values}: give at least one value, each once")
        if "ar" not in self.methods:
            raise ValueError(f"methods = {self.methods}: `ar` must be among them; speedups and exact_match need it")
        self._check_told_apart()
        self.check(self.policy, self.budgets)
        sparse_only = [m for m in self.methods if m in ("sd_sparse", "streaming", "self_sparse", "triforce")]
        if self.budgets == [FULL] and not self.budget_bytes and sparse_only:
            raise ValueError(f"budgets = [full]: `{sparse_only[0]}` needs at least one sparse budget")
        if taken := [name for name in self.drafters if name in OWN_DRAFTERS]:
            raise ValueError(f"drafters: `{taken[0]}` is the study's own; give the drafter another name")
        if self.drafters and "budgetdraft" not in self.methods:
            raise ValueError(f"drafters = {list(self.drafters)}: they are measured by `budgetdraft`; add it to methods")
        if "replay" in self.workloads and self.methods == ["ar"]:
            raise ValueError("methods = ['ar']: `replay` measures drafts; give a method that drafts")
        if "replay" in self.workloads and (self.gamma_mode != "fixed" or self.refresh):
            raise ValueError("workloads: `replay` needs gamma_mode = fixed and refresh = 0")
        if "replay" in self.workloads:
            self._check_replayed()
        return self

    def _check_told_apart(self) -> None:
        labels = [corpus.label for corpus in self.corpus]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(
                f"corpus: {len(twice)} are called `{twice[0]}`, which is all that their rows would be told apart by; "
                "give each a `name` of its own"
            )

    def _check_replayed(self) -> None:
        """A replay walks one text through every context, so it can neither move needles nor ask at a context's end."""
        if any(corpus.source == "needle" for corpus in self.corpus):
            raise ValueError(
                "corpus.source = needle: `replay` reads a text through all contexts, while needles are placed anew and "
                "asked for at the end of each; use workloads = [greedy], in a study of its own"
            )
        if self.workloads == ["replay"] and any(corpus.chat == "always" for corpus in self.corpus):
            raise ValueError(
                "corpus.chat = always: `replay` reads documents without their questions; "
                "use chat = never, or add greedy to the workloads"
            )

    @property
    def replay_tokens(self) -> int:
        """Tokens of the document after a context that its replay reads, drafts included."""
        return (self.replay_positions - 1) * self.replay_stride + max(self.gammas)

    @property
    def longest(self) -> int:
        """Tokens of a document that the grid needs."""
        return max(self.contexts) + (self.replay_tokens if "replay" in self.workloads else 0)
