"""The whole configuration of a study."""

from pydantic import Field, model_validator

from bdcore.config.corpus import Corpora, CorpusConfig
from bdcore.config.grid import GridConfig
from bdcore.config.models import DrafterConfig, ModelConfig, RuntimeConfig
from bdcore.config.section import Section
from bdcore.config.training import TargetsConfig, TrainingConfig


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
