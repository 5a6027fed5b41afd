"""The one configuration: a frozen pydantic tree, read from YAML, changed by dotted overrides, checked at once.

Defaults are the paper's (arXiv 2606.00144 and its authors' code); small sizes live in `configs/*.yaml`.
"""

from collections.abc import Iterable
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
    ValidationError,
    model_validator,
)

from bdcore.kv.budget import FULL, Selection, check_budget, parse_budget

Budget = Annotated[int, BeforeValidator(parse_budget)]
Policy = Literal["attention_mass", "last_key", "sink_recent", "random", "oracle"]
PositionMode = Literal["absolute", "in_cache"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
GammaMode = Literal["fixed", "confidence", "adaptive"]
MethodName = Literal["ar", "sd_full", "sd_sparse", "budgetdraft"]


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
    """CPU threads; default: PyTorch's choice."""


class ModelConfig(Section):
    source: str = "NousResearch/Yarn-Llama-2-7b-128k"
    """`embedded` (SmolLM2-135M-Instruct from the package index), a hub id, or a local checkpoint folder."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""


class DrafterConfig(Section):
    kind: Literal["pretrained", "sliced"] = "pretrained"
    """`pretrained`: a smaller model of the same tokenizer. `sliced`: layers, embedding and head of the verifier."""
    source: str = "JackFram/llama-68m"
    """Hub id or folder of a `pretrained` drafter."""
    revision: str | None = None
    num_layers: PositiveInt = 6
    """`sliced`: how many layers, chosen by measured previous-token and induction scores."""
    layers: list[NonNegativeInt] | None = Field(default=None, min_length=1)
    """`sliced`: these verifier layers instead of measured ones."""
    vocab_size: PositiveInt | None = None
    """`sliced`: keep only this many most frequent ids in the output head (default: all)."""
    rope_theta: float | None = Field(default=None, gt=0)
    """`sliced`: RoPE base of the drafter (default: the verifier's)."""
    max_positions: PositiveInt | None = None
    """`sliced`: positions the drafter is trained for (default: the verifier's)."""
    beyond_positions: Literal["refuse", "extrapolate"] = "extrapolate"
    """What to do with absolute positions past the drafter's own: an error, or plain RoPE extrapolation (the paper)."""


class CorpusConfig(Section):
    source: Literal["stdlib", "pg19", "longbench", "lwm", "folder", "file"] = "pg19"
    """`stdlib`: this Python's own modules. `pg19`, `longbench` (QMSum), `lwm` (NarrativeQA): hub or local Parquet.
    `folder`: every text file below `path`. `file`: one Parquet or JSONL file with a `text` column."""
    path: str | None = None
    """Local file or folder; without it the named hub data set is read. Relative to the configuration file."""
    split: Literal["train", "test"] = "train"
    """Which documents. Sources without splits of their own are divided by a hash of the document's name."""


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


class MixtureConfig(Section):
    """Weights of the kinds of training sequence."""

    forced: float = Field(default=1.0, ge=0)
    generated: float = Field(default=0.0, ge=0)
    repeated: float = Field(default=0.0, ge=0)
    """Human passages repeated, so that the label is the copy; costs no verifier time."""

    @model_validator(mode="after")
    def _some_weight(self) -> "MixtureConfig":
        if self.forced + self.generated + self.repeated <= 0:
            raise ValueError("all weights are 0; give at least one kind a positive weight")
        return self


class SparseConfig(Section):
    """How a sparse cache is chosen, the same for training views and for the grid."""

    policy: Policy = "attention_mass"
    """`attention_mass`: chunks with most attention of the newest queries (the paper). `last_key`: the authors' code.
    `sink_recent`: StreamingLLM. `random`: a control. `oracle` (grid only): chunks the verifier attends to."""
    position_mode: PositionMode = "absolute"
    """`absolute`: kept keys keep their positions (the paper). `in_cache`: re-rotated to 0..n-1."""
    chunk: PositiveInt = 8
    """Tokens per chunk of the prefix."""
    sinks: int = Field(default=8, ge=0)
    """First tokens that are always kept."""
    recent: int = Field(default=8, ge=0)
    """Newest tokens that are always kept (`sink_recent` fills the whole budget with them)."""
    window: PositiveInt = 8
    """Newest queries whose attention scores the chunks."""

    @model_validator(mode="after")
    def _window_is_kept(self) -> "SparseConfig":
        if self.policy == "attention_mass" and self.window > self.recent:
            raise ValueError(
                f"window = {self.window} > recent = {self.recent}: the observed queries' own keys must stay"
            )
        return self

    def check(self, budgets: Iterable[int]) -> None:
        for budget in budgets:
            check_budget(budget, chunk=self.chunk, sinks=self.sinks, recent=self.recent)

    def selection(self, seed: int) -> Selection:
        return Selection(self.policy, self.chunk, self.sinks, self.recent, self.window, seed)


class ViewsConfig(SparseConfig):
    """The sparse views of L_C: budgets drawn by weight, one per step."""

    budgets: dict[Budget, float] = {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    """Budget -> weight."""

    @model_validator(mode="after")
    def _legal(self) -> "ViewsConfig":
        if not self.budgets or min(self.budgets.values()) < 0 or sum(self.budgets.values()) <= 0:
            raise ValueError(f"budgets = {self.budgets}: weights must be >= 0 and not all 0")
        if self.policy == "oracle":
            raise ValueError("policy = oracle: training has no verifier beside it; use another policy for the views")
        self.check(self.budgets)
        return self


class TrainingConfig(Section):
    """One training stage: L = L_A + lam * L_C from one prefix. `lam = 0` leaves L_A alone."""

    steps: PositiveInt = 5000
    batch_size: PositiveInt = 1
    prefix_lengths: dict[PositiveInt, float] = {16128: 1.0}
    """Prefix length -> weight; one drawn per step."""
    continuation: PositiveInt = 256
    """Tokens after the prefix, supervised by L_A and L_C."""
    supervise: Literal["continuation", "all"] = "continuation"
    """L_A on the continuation only (the paper), or on every position; `all` also lets gradients into the prefix."""
    detach_prefix: bool = True
    """L_C: keep gradients out of the kept prefix keys and values (the paper)."""
    lam: float = Field(default=0.5, ge=0)
    views: ViewsConfig = ViewsConfig()
    mixture: MixtureConfig = MixtureConfig()
    kl_weight: float = Field(default=0.0, ge=0, le=1)
    """Share of KL on the verifier's top-k beside cross-entropy to its greedy token."""
    learning_rate: float = Field(default=1e-5, gt=0)
    head_scale: float = Field(default=1.0, gt=0)
    """Learning rate of the output head, relative."""
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, gt=0)
    warmup: int = Field(default=150, ge=0)
    validation: int = Field(default=4, ge=0)
    """Sequences held out of training for the agreement that is logged by view."""
    eval_every: PositiveInt = 500
    """Steps between validations."""
    checkpoint_every: PositiveInt = 100
    """Steps between resumable checkpoints."""

    @model_validator(mode="after")
    def _legal(self) -> "TrainingConfig":
        if not self.prefix_lengths or sum(self.prefix_lengths.values()) <= 0 or min(self.prefix_lengths.values()) < 0:
            raise ValueError(f"prefix_lengths = {self.prefix_lengths}: weights must be >= 0 and not all 0")
        if self.lam and self.supervise == "continuation" and not self.detach_prefix:
            raise ValueError(
                "detach_prefix = false needs supervise = all: the paper's scheme runs the prefix without gradients"
            )
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest training sequence."""
        return max(self.prefix_lengths) + self.continuation


class GridConfig(SparseConfig):
    """The evaluation grid: methods x contexts x budgets x gammas, on the same prompts."""

    corpus: CorpusConfig = CorpusConfig(split="test")
    methods: list[MethodName] = ["ar", "sd_full", "sd_sparse", "budgetdraft"]
    contexts: list[PositiveInt] = [3800, 8192, 16384]
    """Prompt lengths."""
    budgets: list[Budget] = [256, 512, 1024, 2048]
    """Keys the drafter may cache per layer and head; `full` (-1) is legal for `budgetdraft`."""
    budget_bytes: list[ByteSize] = []
    """Budgets stated as memory of the drafter's whole cache, block in flight included, such as 8MiB; become keys."""
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
    """Documents per context."""
    new_tokens: PositiveInt = 256
    prefill_chunk: PositiveInt = 512
    """Tokens fed at once while reading a prompt with the full cache. A sparse drafter reads a quarter of its budget."""

    @model_validator(mode="after")
    def _legal(self) -> "GridConfig":
        for name in ("methods", "contexts", "budgets", "gammas"):
            values = getattr(self, name)
            empty = not values and not (name == "budgets" and self.budget_bytes)
            if empty or len(set(values)) != len(values):
                raise ValueError(f"{name} = {values}: give at least one value, each once")
        if "ar" not in self.methods:
            raise ValueError(f"methods = {self.methods}: `ar` must be among them; speedups and exact_match need it")
        self.check(self.budgets)
        if self.budgets == [FULL] and not self.budget_bytes and "sd_sparse" in self.methods:
            raise ValueError("budgets = [full]: `sd_sparse` needs at least one sparse budget")
        return self


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
    corpus: CorpusConfig = CorpusConfig()
    """Documents for targets and training."""
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
        if stage.validation >= self.targets.forced:
            raise ValueError(
                f"{name}.validation = {stage.validation} leaves nothing of "
                f"targets.forced = {self.targets.forced} to train on"
            )
        if stage.longest > self.targets.length:
            raise ValueError(
                f"{name}: prefix + continuation = {stage.longest} is longer than targets.length = {self.targets.length}"
            )
        if stage.kl_weight and not self.targets.top_k:
            raise ValueError(f"{name}.kl_weight = {stage.kl_weight} needs targets.top_k >= 1")
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

    Relative corpus and model folders are resolved against the configuration file. Raises ConfigError in one line.
    """
    path = Path(path).expanduser().resolve()
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


def _apply(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {override!r}: write it as section.field=value")
    *sections, last = key.strip().split(".")
    node = raw
    for section in sections:
        inner = node.get(section)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
        node[section] = dict(inner or {})  # a copy: with YAML aliases other sections hold the same one
        node = node[section]
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    grid = raw.get("grid")
    for node in (raw.get("corpus"), grid.get("corpus") if isinstance(grid, dict) else None):
        if isinstance(node, dict) and isinstance(node.get("path"), str):
            node["path"] = str((folder / Path(node["path"]).expanduser()).resolve())
    for node in (raw.get("verifier"), raw.get("drafter")):
        if (
            isinstance(node, dict)
            and isinstance(node.get("source"), str)
            and node["source"].startswith((".", "/", "~"))
        ):
            node["source"] = str((folder / Path(node["source"]).expanduser()).resolve())


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
        field = model.model_fields.get(str(part)) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return "see the documentation"
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return "legal keys: " + ", ".join(model.model_fields) if model is not None else "see the documentation"
