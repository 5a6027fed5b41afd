"""The one configuration: a frozen pydantic tree, read from YAML, changed by dotted overrides, checked at once.

Defaults are the paper's (arXiv 2606.00144 and its authors' code); small sizes live in `configs/*.yaml`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from bdcore.kv.budget import FULL, READS_AHEAD, STORES_ALL, Selection, check_budget, parse_budget


def _listed(value: Any) -> Any:
    """One value where a list is meant."""
    return value if isinstance(value, list) else [value]


def _weighed(value: Any) -> Any:
    """One value where weights are meant: it alone."""
    return {value: 1.0} if isinstance(value, str) else value


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
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
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


TextSource = Literal["stdlib", "pg19", "longbench", "lwm", "folder", "file"]
Chat = Literal["never", "auto", "always"]
FrameName = Literal["benchmark", "paper"]
Depth = Annotated[float, Field(ge=0, le=1)]


def _exclusion(value: Any) -> Any:
    """An exclusion with every value listed, and budgets as numbers."""
    if not isinstance(value, dict):
        return value
    listed = {name: _listed(found) for name, found in value.items()}
    return {n: [parse_budget(v) for v in found] if n == "budget" else found for n, found in listed.items()}


class ConfigError(ValueError):
    """Bad user input. The message names the field, the value and what would be legal."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RuntimeConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run; `auto` takes CUDA when there is one."""
    dtype: DtypeName = "auto"
    """Arithmetic of the verifier for targets. `auto`: bfloat16 where the hardware multiplies it, else float32."""
    training_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of training: autocast over float32 master weights. No float16, which would need loss scaling."""
    grid_dtype: DtypeName = "float32"
    """Arithmetic of both models in the evaluation grid. float32 makes greedy decoding exactly lossless."""
    threads: PositiveInt | None = None
    """CPU threads of a process; default: PyTorch's choice, or a share of the cores where several train together."""


class ModelConfig(Section):
    source: str = "NousResearch/Yarn-Llama-2-7b-128k"
    """`embedded` (SmolLM2-135M-Instruct from the package index), a hub id, or a local checkpoint folder."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""


class DrafterConfig(Section):
    kind: Literal["pretrained", "sliced"] = "pretrained"
    """`pretrained`: a smaller model of the same tokenizer. `sliced`: layers, embedding and head of the verifier."""
    source: str = "JackFram/llama-68m"
    """`pretrained`: hub id or folder."""
    revision: str | None = None
    """`pretrained`: hub revision (branch, tag or commit)."""
    num_layers: PositiveInt = 6
    """`sliced`: how many layers, chosen by measured previous-token and induction scores."""
    layers: list[NonNegativeInt] | None = Field(default=None, min_length=1)
    """`sliced`: these verifier layers instead of measured ones."""
    vocab_size: PositiveInt | None = None
    """Keep only this many ids in the output head, the most frequent among the targets (default: all)."""
    rope_theta: float | None = Field(default=None, gt=0)
    """`sliced`: RoPE base of the drafter (default: the verifier's)."""
    max_positions: PositiveInt | None = None
    """`sliced`: positions the drafter is trained for (default: the verifier's)."""
    beyond_positions: Literal["refuse", "extrapolate"] = "extrapolate"
    """What to do with absolute positions past the drafter's own: an error, or plain RoPE extrapolation (the paper)."""

    @model_validator(mode="before")
    @classmethod
    def _taken_back(cls, given: Any) -> Any:
        """`null` takes back what an overlay or an override inherits."""
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _of_its_kind(self) -> "DrafterConfig":
        for name in _OF_THE_OTHER_KIND[self.kind]:
            if name in self.model_fields_set:
                raise ValueError(
                    f"{name} = {getattr(self, name)}: a `{self.kind}` drafter has no such setting; take it out, or "
                    f"write {name}: null where it is inherited"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_the_other_kinds(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name not in _OF_THE_OTHER_KIND[self.kind]}


_OF_THE_OTHER_KIND = {
    "pretrained": ("num_layers", "layers", "rope_theta", "max_positions"),
    "sliced": ("source", "revision"),
}
"""Settings that a kind of drafter would ignore."""


class CorpusConfig(Section):
    source: TextSource | Literal["needle"] = "pg19"
    """`stdlib`: this Python's own modules. `pg19`, `longbench` (QMSum), `lwm` (NarrativeQA): hub or local Parquet.
    `folder`: every text file below `path`. `file`: one Parquet or JSONL file with a `text` column. `needle`: made
    here, secret numbers hidden in the text of another corpus, one of which is asked for at the end."""
    path: str | None = None
    """Local file or folder; without it the named hub data set is read. Relative to the configuration file."""
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]{0,39}$")
    """What rows and reports call it (default: its source). A grid with two corpora of one source needs it."""
    split: Literal["train", "test"] = "train"
    """Which documents. Sources without splits of their own are divided by a hash of the document's name."""
    filler: TextSource = "stdlib"
    """`needle`: the corpus whose text hides the numbers; `path` and `split` are its own."""
    depths: Annotated[list[Depth], BeforeValidator(_listed), Field(min_length=1, max_length=16)] = [0.1, 0.5, 0.9]
    """`needle`: where the numbers are hidden, one at each: 0 begins the text, 1 ends it, at every context length.
    Documents ask for each depth in turn."""
    seed: NonNegativeInt = 0
    """`needle`: another draw of names and numbers."""
    chat: Chat = "never"
    """Whether a prompt that asks a question is put as a user's turn, by the chat template of the verifier's tokenizer.
    `auto`: where it has one. `always`: it must have one. Documents without a question are plain text in any case."""
    frame: FrameName = "benchmark"
    """`longbench`, `lwm`: what the prompt says around the document. `benchmark`: LongBench's instruction and question.
    `paper`: as the authors' code has it, the bare query after a transcript, and a request to summarize a book."""

    @model_validator(mode="after")
    def _legal(self) -> "CorpusConfig":
        for name in _NEEDLE_FIELDS:
            if self.source != "needle" and name in self.model_fields_set:
                raise ValueError(f"{name} = {getattr(self, name)}: source `{self.source}` has none; only `needle` has")
        if len(set(self.depths)) < len(self.depths):
            raise ValueError(f"depths = {self.depths}: give each once")
        if self.chat == "always" and self.source not in ASKING:
            raise ValueError(
                f"chat = always: source `{self.source}` asks no questions; use never, or one of {', '.join(ASKING)}"
            )
        if self.frame == "paper" and (self.source not in FRAMED or self.chat != "never"):
            raise ValueError(f"frame = paper: needs chat = never and one of the sources {', '.join(FRAMED)}")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_set(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Keys hash this: a setting that a corpus does not have must not change the key of what it has made.
        left_out = () if self.source == "needle" else _NEEDLE_FIELDS
        for name, usual in (("name", None), ("chat", "never"), ("frame", "benchmark")):
            left_out = (*left_out, name) if getattr(self, name) == usual else left_out
        return {name: value for name, value in dump(self).items() if name not in left_out}

    @property
    def label(self) -> str:
        """What tells its rows from those of other corpora."""
        return self.name or self.source

    @property
    def texts(self) -> "CorpusConfig":
        """The corpus whose files are read: this one, or a needle's filler."""
        return CorpusConfig(source=self.filler, path=self.path, split=self.split) if self.source == "needle" else self

    @property
    def offline(self) -> bool:
        """Whether it can be read without a network."""
        return self.path is not None or self.texts.source == "stdlib"


_NEEDLE_FIELDS = ("filler", "depths", "seed")
ASKING = ("longbench", "lwm", "needle")
"""Sources whose prompts ask a question."""
FRAMED = ("longbench", "lwm")
"""Sources for which the authors' code has prompts of its own."""

Corpora = Annotated[list[CorpusConfig], BeforeValidator(_listed), Field(min_length=1)]


class TargetsConfig(Section):
    forced: PositiveInt = 5004
    """Sequences of human text with the verifier's greedy token at every position."""
    length: int = Field(default=16384, ge=16)
    """Tokens per forced sequence."""
    generated: int = Field(default=0, ge=0)
    """Sequences of the verifier's own greedy continuation (on-policy)."""
    prompt_tokens: int = Field(default=256, ge=8)
    """Prompt length of a generated sequence."""
    new_tokens: int = Field(default=256, ge=8)
    """Length of a generated continuation."""
    batch_size: PositiveInt = 16
    """Continuations generated together."""
    top_k: PositiveInt = 8
    """Verifier log-probabilities stored per position."""
    shard_size: PositiveInt = 8
    """Sequences per Parquet file: what a killed run loses at most."""


def check_weights(name: str, weights: Mapping[Any, float]) -> None:
    if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"{name} = {weights}: weights must be >= 0 and not all 0")


class MixtureConfig(Section):
    """Weights of the kinds of training sequence."""

    forced: float = Field(default=1.0, ge=0)
    generated: float = Field(default=0.0, ge=0)
    repeated: float = Field(default=0.0, ge=0)
    """Human passages repeated, so that the label is the copy; costs no verifier time."""

    @model_validator(mode="after")
    def _some_weight(self) -> "MixtureConfig":
        check_weights("mixture", self.model_dump())
        return self


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


class ViewsConfig(SparseConfig):
    """The sparse views of L_C: policy, budget and position mode, each drawn by its own weights.

    `views: paper` in a configuration is the paper's sampler, which is also the default; `quarter` its budgets by four.
    """

    budgets: dict[Budget, float] = {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    """Budget -> weight. Keys of the prefix that the continuation sees, per layer and head."""
    policy: Annotated[dict[Policy, float], BeforeValidator(_weighed)] = {"attention_mass": 1.0}
    """Policy, or policy -> weight."""
    position_mode: Annotated[dict[PositionMode, float], BeforeValidator(_weighed)] = {"absolute": 1.0}
    """Position mode, or mode -> weight."""
    per_step: PositiveInt = 1
    """Sparse views of every continuation (or block) in one step, each drawn anew."""

    @model_validator(mode="after")
    def _legal(self) -> "ViewsConfig":
        for name in ("budgets", "policy", "position_mode"):
            check_weights(name, getattr(self, name))
        if "oracle" in self.policy:
            raise ValueError("policy = oracle: training has no verifier beside it; use another policy for the views")
        if found := [name for name in self.policy if name in STORES_ALL]:
            raise ValueError(
                f"policy = {found[0]}: views choose from the whole prefix under every policy; use attention_mass or "
                "attention_ahead"
            )
        self.check(self.policy, self.budgets)
        return self


# Whole sections: what a preset left out, an overlay would keep of the file that it extends.
VIEW_PRESETS: dict[str, dict[str, Any]] = {
    "paper": ViewsConfig().model_dump(),
    "quarter": ViewsConfig(budgets={64: 0.4, 128: 0.3, 256: 0.2, 512: 0.1}).model_dump(),
}


def _preset(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in VIEW_PRESETS:
        raise ValueError(f"no preset of this name; legal: {', '.join(VIEW_PRESETS)}, or a section")
    return VIEW_PRESETS[value]


class LossConfig(Section):
    """Weights of the losses of one branch; they are added up. Cross-entropy alone is the paper's."""

    ce: float = Field(default=1.0, ge=0)
    """Cross-entropy to the verifier's greedy token."""
    kl: float = Field(default=0.0, ge=0)
    """KL(verifier || drafter) over the verifier's top-k."""
    reverse_kl: float = Field(default=0.0, ge=0)
    """KL(drafter || verifier) over the same ids."""
    tv: float = Field(default=0.0, ge=0)
    """Total variation: the probability that sampled decoding rejects the drafter's token."""
    lk: float = Field(default=0.0, ge=0)
    """Minus the log of the probability that sampled decoding accepts it."""

    @model_validator(mode="after")
    def _some_weight(self) -> "LossConfig":
        check_weights("loss", self.model_dump())
        return self


class ValidationConfig(Section):
    """What is measured of held-out documents while training, by view; the best weights are kept by it."""

    sequences: int = Field(default=4, ge=0)
    """Forced sequences held out of training (and all else of their documents)."""
    every: PositiveInt = 500
    """Steps between validations."""
    decode_tokens: int = Field(default=0, ge=0)
    """Draft positions per held-out sequence that are measured by real decoding: the cache of the budget, read piece by
    piece as at inference. 0: teacher-forced agreement alone."""
    patience: int = Field(default=0, ge=0)
    """Validations without a better mean over views after which training stops; 0: never."""
    keep: Literal["last", "best"] = "last"
    """Which weights become the drafter; the other ones are stored beside it."""


class TrainingConfig(Section):
    """One training stage: L = L_A + lam * L_C from one prefix. `lam = 0` leaves L_A alone."""

    seed: int = Field(default=0, ge=0)
    """Another draw of sequences and views from the same targets, beside the study's seed."""
    steps: PositiveInt = 5000
    batch_size: PositiveInt = 1
    """Sequences per forward and process."""
    accumulate: PositiveInt = 1
    """Forwards per optimizer step; losses are means over all their tokens."""
    processes: PositiveInt = 1
    """Processes that share a step, each with its own sequences, started by torchrun (gloo on CPU, nccl on GPUs)."""
    prefix_lengths: dict[PositiveInt, float] = {16128: 1.0}
    """Prefix length -> weight; one drawn per step."""
    continuation: PositiveInt = 256
    """Tokens after the prefix, supervised by L_A and L_C. With `supervise = dense`: tokens per block."""
    supervise: Literal["continuation", "all", "dense"] = "continuation"
    """`continuation`: both losses on the tokens after the prefix (the paper). `all`: L_A on every position. `dense`:
    also L_C on every block of the sequence, each block with a sparse view of its own prefix, all in one pass."""
    detach_prefix: bool = True
    """L_C: keep gradients out of the kept prefix keys and values (the paper)."""
    lam: float = Field(default=0.5, ge=0)
    views: Annotated[ViewsConfig, BeforeValidator(_preset)] = ViewsConfig()
    mixture: MixtureConfig = MixtureConfig()
    loss_a: LossConfig = LossConfig()
    loss_c: LossConfig = LossConfig()
    learning_rate: float = Field(default=1e-5, gt=0)
    head_scale: float = Field(default=1.0, gt=0)
    """Learning rate of the output head, relative. An embedding tied to the head learns at it too."""
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, gt=0)
    warmup: int = Field(default=150, ge=0)
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory for a third more time."""
    validation: ValidationConfig = ValidationConfig()
    checkpoint_every: PositiveInt = 100
    """Steps between resumable checkpoints. SIGTERM saves one too."""

    @model_validator(mode="after")
    def _legal(self) -> "TrainingConfig":
        check_weights("prefix_lengths", self.prefix_lengths)
        if self.warmup >= self.steps:
            raise ValueError(
                f"warmup = {self.warmup}: must be less than steps = {self.steps}; lower it, or train longer"
            )
        if self.lam and self.supervise == "continuation" and not self.detach_prefix:
            raise ValueError(
                "detach_prefix = false needs supervise = all or dense: the paper's scheme runs the prefix without "
                "gradients"
            )
        if self.validation.patience and not self.validation.sequences:
            raise ValueError(f"validation.patience = {self.validation.patience} needs validation.sequences >= 1")
        if self.validation.keep == "best" and not self.validation.sequences:
            raise ValueError("validation.keep = best needs validation.sequences >= 1")
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest training sequence; a prefix of weight 0 is never drawn."""
        return max(length for length, weight in self.prefix_lengths.items() if weight) + self.continuation


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
    workloads: Annotated[list[Workload], BeforeValidator(_listed)] = ["greedy"]
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
    policy: Annotated[list[Policy], BeforeValidator(_listed)] = ["attention_mass"]
    """Policies by which a sparse cache is chosen."""
    position_mode: Annotated[list[PositionMode], BeforeValidator(_listed)] = ["absolute"]
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


class TrackingConfig(Section):
    enabled: bool = True
    experiment: str = "budgetdraft"


class Config(Section):
    name: str = Field(default="paper", pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the study; runs and reports carry it."""
    seed: int = Field(default=42, ge=0)
    runtime: RuntimeConfig = RuntimeConfig()
    verifier: ModelConfig = ModelConfig()
    drafter: DrafterConfig = DrafterConfig()
    corpus: Corpora = [CorpusConfig()]
    """Documents for targets and training: one corpus or several, mixed."""
    targets: TargetsConfig = TargetsConfig()
    base: TrainingConfig | None = None
    """Trains a `sliced` drafter into the base drafter before the multi-view stage."""
    training: TrainingConfig = TrainingConfig()
    """The multi-view stage: the base drafter becomes the BudgetDraft drafter."""
    grid: GridConfig = GridConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        for name, stage in (("base", self.base), ("training", self.training)):
            if stage is not None:
                self._check_stage(name, stage)
        if self.drafter.kind == "pretrained" and self.base is not None:
            raise ValueError(
                "base: only a `sliced` drafter is trained into a base drafter; remove base or set drafter.kind"
            )
        if self.drafter.kind == "pretrained" and self.drafter.source == "embedded":
            raise ValueError("drafter.source = embedded: only the verifier is embedded; use drafter.kind = sliced")
        if self.drafter.layers is not None and len(self.drafter.layers) != len(set(self.drafter.layers)):
            raise ValueError(f"drafter.layers = {self.drafter.layers}: each layer once")
        return self

    def _check_stage(self, name: str, stage: TrainingConfig) -> None:
        held_out = stage.validation.sequences
        if held_out >= self.targets.forced:
            raise ValueError(
                f"{name}.validation.sequences = {held_out} leaves nothing of "
                f"targets.forced = {self.targets.forced} to train on"
            )
        if stage.longest > self.targets.length:
            raise ValueError(
                f"{name}: prefix + continuation = {stage.longest} is longer than targets.length = {self.targets.length}"
            )
        if stage.mixture.generated:
            have = self.targets.prompt_tokens + self.targets.new_tokens
            if not self.targets.generated:
                raise ValueError(f"{name}.mixture.generated = {stage.mixture.generated} needs targets.generated >= 1")
            if stage.longest > have:
                raise ValueError(
                    f"{name}: generated sequences have {have} tokens (targets.prompt_tokens + targets.new_tokens), "
                    f"prefix + continuation = {stage.longest}; lengthen them or set mixture.generated = 0"
                )


def load_config(path: str | Path, overrides: list[str] | None = None, *, limit: int | None = None) -> Config:
    """Read YAML, apply `key.sub=value` overrides (values are YAML) and `limit` (prompts per context), validate.

    `extends: other.yaml` starts from another configuration: sections are merged, every other value replaced. Relative
    corpus and model folders are resolved against the file that names them. Raises ConfigError in one line.
    """
    path = Path(path).expanduser().resolve()
    raw = _read(path, [])
    for override in overrides or []:
        _apply(raw, override)
    if limit is not None:
        if limit < 1:
            raise ConfigError(f"limit = {limit}: at least 1 prompt per context")
        grid = raw["grid"] = raw.get("grid") or {}
        prompts = grid.get("prompts", GridConfig().prompts) if isinstance(grid, dict) else None
        if isinstance(prompts, int):  # anything else is for validation to name
            grid["prompts"] = min(limit, prompts)
    _resolve_paths(raw, path.parent)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_one_line(path, error)) from error


def _read(path: Path, seen: list[Path]) -> dict[str, Any]:
    """A configuration file over the one that it extends."""
    if path in seen:
        raise ConfigError(f"configuration {path}: extends itself by way of {seen[-1].name}")
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"configuration {path}: expected sections, found {type(raw).__name__}")
    other = raw.pop("extends", None)
    _resolve_paths(raw, path.parent)
    _expand_presets(raw)
    if other is None:
        return raw
    if not isinstance(other, str):
        raise ConfigError(f"configuration {path}: extends = {other!r}: give the name of a configuration file")
    return _merged(_read((path.parent / Path(other).expanduser()).resolve(), [*seen, path]), raw)


def _expand_presets(raw: dict[str, Any]) -> None:
    """Write presets out, so that overlays and overrides can change parts of them."""
    for stage in (raw.get("base"), raw.get("training")):
        if isinstance(stage, dict) and isinstance(stage.get("views"), str):
            stage["views"] = VIEW_PRESETS.get(stage["views"], stage["views"])  # validation names an unknown one


_WEIGHTS = frozenset({"budgets", "prefix_lengths", "mixture", "policy", "position_mode", "loss_a", "loss_c"})
"""Settings whose mappings are one value: an overlay replaces them whole."""


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        inner = base.get(key)
        whole = key in _WEIGHTS or not (isinstance(inner, dict) and isinstance(value, dict))
        out[key] = value if whole else _merged(inner, value)  # pyright: ignore[reportArgumentType]
    return out


def _apply(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {override!r}: write it as section.field=value")
    *sections, last = key.strip().split(".")
    node: Any = raw
    for section in sections:
        inner = _entry(node, section, override)
        if inner is not None and not isinstance(inner, dict | list):
            raise ConfigError(f"override {override!r}: {section} is not a section")
        copy = list(inner) if isinstance(inner, list) else dict(inner or {})  # with aliases others hold the same one
        node[int(section) if isinstance(node, list) else section] = copy
        node = copy
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error
    _entry(node, last, override)
    node[int(last) if isinstance(node, list) else last] = value


def _entry(node: Any, key: str, override: str) -> Any:
    """What a section has under a name, or a list at an index."""
    if isinstance(node, dict):
        return node.get(key)
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"override {override!r}: {key} is no entry of a list of {len(node)}")
    return node[int(key)]


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    grid = raw.get("grid")
    corpora = [*_listed(raw.get("corpus")), *_listed(grid.get("corpus") if isinstance(grid, dict) else None)]
    for node in corpora:
        if isinstance(node, dict) and isinstance(node.get("path"), str):
            node["path"] = str((folder / Path(node["path"]).expanduser()).resolve())
    models = [(node, "source") for node in (raw.get("verifier"), raw.get("drafter"))]
    more = grid.get("drafters") if isinstance(grid, dict) else None
    models += [(more, name) for name in more] if isinstance(more, dict) else []
    for node, name in models:
        if isinstance(node, dict) and isinstance(node.get(name), str) and node[name].startswith((".", "/", "~")):
            node[name] = str((folder / Path(node[name]).expanduser()).resolve())


def _one_line(path: Path, error: ValidationError) -> str:
    lines: list[str] = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; {_siblings(item['loc'])}")
            continue
        message = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        shown = "" if isinstance(given, dict) else f" = {given!r}"
        lines.append(f"{where}{shown}: {message}")
    return f"{path.name}: " + "; ".join(lines)


def _siblings(loc: tuple[int | str, ...]) -> str:
    model: Any = Config
    for part in loc[:-1]:
        if isinstance(part, int):  # an entry of a list
            continue
        field = model.model_fields.get(str(part)) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return "see the documentation"
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return "legal keys: " + ", ".join(model.model_fields) if model is not None else "see the documentation"
