"""The shape of a model, known without loading weights: for checks and estimates before anything runs."""

from dataclasses import dataclass, replace
from typing import Any

from bdcore.config import ConfigError, DrafterConfig, ModelConfig
from bdcore.models.loading import EMBEDDED, check_model


@dataclass(frozen=True)
class ModelShape:
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    head_rows: int
    """Rows of the output head: fewer than `vocab` where it is pruned."""
    tied: bool = True
    """Whether the head is the embedding."""

    @property
    def body_parameters(self) -> int:
        """Weights of the layers, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.query_heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        return self.hidden * self.head_rows

    @property
    def parameters(self) -> int:
        """All weights in memory; a tied head counts once."""
        head = 0 if self.tied else self.head_parameters
        return self.body_parameters + self.hidden * self.vocab + head

    def kv_bytes(self, tokens: int, element_size: int) -> int:
        """Keys and values of `tokens` cached tokens, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * element_size

    def flops(self, tokens: int, context: int) -> float:
        """Multiply-adds (times two) of a forward over `tokens` that see `context` tokens on average, head included."""
        dense = 2 * (self.body_parameters + self.head_parameters)
        attention = 4 * self.layers * self.query_heads * self.head_dim * context
        return tokens * (dense + attention)


_EMBEDDED_SHAPE = ModelShape(30, 576, 1536, 9, 3, 64, 49152, 8192, 49152)
"""SmolLM2-135M; reading it from the GGUF file would take a quarter of a minute."""


def verifier_shape(model: ModelConfig) -> ModelShape:
    """ConfigError where the model cannot be found or its family is not supported."""
    if model.source == EMBEDDED:
        check_model("verifier.source", EMBEDDED)
        return _EMBEDDED_SHAPE
    return from_config(check_model("verifier.source", model.source, revision=model.revision))


def drafter_shape(drafter: DrafterConfig, verifier: ModelShape) -> ModelShape:
    """ConfigError where the model cannot be found, or `verifier` has not what the drafter is to be made of."""
    if drafter.kind == "pretrained":
        own = from_config(check_model("drafter.source", drafter.source, revision=drafter.revision))
        rows = _head_rows(drafter, min(own.vocab, verifier.vocab))
        return replace(own, head_rows=rows, tied=own.tied and rows == own.vocab)
    layers = len(drafter.layers) if drafter.layers else drafter.num_layers
    if layers > verifier.layers or (drafter.layers and max(drafter.layers) >= verifier.layers):
        wanted = drafter.layers or drafter.num_layers
        raise ConfigError(
            f"drafter: layers {wanted} of a verifier that has {verifier.layers} (0..{verifier.layers - 1})"
        )
    if drafter.layers is None and layers < 2:
        raise ConfigError(f"drafter.num_layers = {layers}: the first and the last layer are always taken; at least 2")
    rows, positions = _head_rows(drafter, verifier.vocab), drafter.max_positions or verifier.positions
    return replace(verifier, layers=layers, head_rows=rows, positions=positions, tied=False)


def _head_rows(drafter: DrafterConfig, ids: int) -> int:
    """Outputs of a head cut down from the `ids` that verifier and drafter have in common."""
    if drafter.vocab_size is not None and drafter.vocab_size > ids:
        raise ConfigError(
            f"drafter.vocab_size = {drafter.vocab_size}: verifier and drafter share a vocabulary of {ids} ids; use at "
            "most that, or leave it out to keep all"
        )
    return drafter.vocab_size or ids


def from_config(config: Any) -> ModelShape:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim,
        config.vocab_size,
        config.max_position_embeddings,
        config.vocab_size,
        tied=bool(config.tie_word_embeddings),
    )
