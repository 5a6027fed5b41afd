"""Targets, and a training stage: what it sees, what it minimises, how it goes on."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from bdcore.config.section import Section, check_weights, weighed
from bdcore.config.sparse import Budget, Policy, PositionMode, SparseConfig
from bdcore.kv.budget import STORES_ALL


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
        check_weights("mixture", self.model_dump())
        return self


class ViewsConfig(SparseConfig):
    """The sparse views of L_C: policy, budget and position mode, each drawn by its own weights.

    `views: paper` in a configuration is the paper's sampler, which is also the default; `quarter` its budgets by four.
    """

    budgets: dict[Budget, float] = {256: 0.4, 512: 0.3, 1024: 0.2, 2048: 0.1}
    """Budget -> weight. Keys of the prefix that the continuation sees, per layer and head."""
    policy: Annotated[dict[Policy, float], BeforeValidator(weighed)] = {"attention_mass": 1.0}
    """Policy, or policy -> weight."""
    position_mode: Annotated[dict[PositionMode, float], BeforeValidator(weighed)] = {"absolute": 1.0}
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
