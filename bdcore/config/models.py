"""Where models run, and which: the verifier and the drafter."""

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from bdcore.config.section import Section

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


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
