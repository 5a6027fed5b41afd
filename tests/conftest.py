"""Fixtures: the tiny random Llama of the cases (T), its twin and noisy drafters."""

import copy
import os
import tempfile

# Importing Prefect makes its home: never the user's own.
os.environ.setdefault("PREFECT_HOME", tempfile.mkdtemp(prefix="budgetdraft-prefect-"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings
from transformers import LlamaConfig, LlamaForCausalLM

from bdcore.kv.attention import NAME as ATTENTION
from bdcore.models.drafter import Drafter

# Time limits of single examples fail on a busy machine, and say nothing.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def tiny_llama(*, vocab=128, layers=2, max_positions=512, seed=0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,  # default 0.02 gives near-constant greedy text
        **changes,
    )
    config._attn_implementation = ATTENTION
    return LlamaForCausalLM(config).float().eval()


def noisy_copy(model: LlamaForCausalLM, scale: float = 0.02, seed: int = 1) -> LlamaForCausalLM:
    """The same weights plus Gaussian noise: some drafts are accepted, some are not."""
    generator = torch.Generator().manual_seed(seed)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return noisy


@pytest.fixture(scope="session")
def verifier():
    return tiny_llama()


@pytest.fixture(scope="session")
def twin(verifier):
    return Drafter(copy.deepcopy(verifier), None)


@pytest.fixture(scope="session")
def noisy(verifier):
    return Drafter(noisy_copy(verifier), None)


@pytest.fixture
def prompt():
    generator = torch.Generator().manual_seed(7)

    def make(length: int) -> list[int]:
        return torch.randint(3, 128, (length,), generator=generator).tolist()

    return make
