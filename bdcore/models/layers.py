"""What attention of each layer needs to be computed outside the model: scale, cap, sliding window, RoPE frequencies."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LayerFacts:
    scale: float
    """Of the attention logits."""
    softcap: float | None
    window: int | None
    """Sliding window in tokens; None: full attention."""
    inv_freq: Tensor
    """RoPE frequencies (D / 2,), which differ by kind of layer in Gemma 3."""


def layer_facts(model: Any) -> list[LayerFacts]:
    """One entry per layer, read from the modules themselves."""
    return [_facts(model, layer.self_attn) for layer in model.model.layers]


def _facts(model: Any, attention: Any) -> LayerFacts:
    family = model.config.model_type
    # Mistral's modules read the window from the config; Gemma 3's have a cap that they do not apply.
    return LayerFacts(
        scale=attention.scaling,
        softcap=attention.attn_logit_softcapping if family == "gemma2" else None,
        window=model.config.sliding_window if family == "mistral" else getattr(attention, "sliding_window", None),
        inv_freq=_inv_freq(model.model.rotary_emb, attention),
    )


def _inv_freq(rotary: Any, attention: Any) -> Tensor:
    if hasattr(rotary, "inv_freq"):
        return rotary.inv_freq
    return getattr(rotary, f"{attention.layer_type}_inv_freq")
