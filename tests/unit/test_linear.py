"""The faster products of linear layers: equal to the library's, for every block length, dtype and shape."""

import copy

import pytest
import torch
from torch import nn

from bdcore.models import linear
from bdcore.models.linear import BlockLinear, adapt
from tests.conftest import tiny_llama


def layers(n=70, k=48, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    plain = nn.Linear(k, n, bias=bias).to(dtype)
    return plain, adapt(copy.deepcopy(plain))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 9, 63, 64, 65, 200])
@pytest.mark.parametrize("lead", [(), (1,), (2,)])
def test_a_block_of_any_length_gives_what_the_library_gives(tokens, lead, bias):
    plain, fast = layers(bias=bias)
    assert type(fast) is BlockLinear
    x = torch.randn(*lead, tokens, 48)
    with torch.inference_mode():
        out = fast(x)
    assert out.shape == (*lead, tokens, 70) and out.is_contiguous()
    torch.testing.assert_close(out, plain(x), atol=1e-5, rtol=1e-5)


def test_a_single_vector_and_an_empty_block_are_no_exception():
    plain, fast = layers()
    with torch.inference_mode():
        torch.testing.assert_close(fast(torch.ones(48)), plain(torch.ones(48)), atol=1e-5, rtol=1e-5)
        assert fast(torch.ones(1, 0, 48)).shape == (1, 0, 70)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 8, 40])
def test_bfloat16_is_rounded_once_whatever_the_processor_can(tokens, native, monkeypatch):
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: native)
    monkeypatch.setattr(linear, "_TILE", 32)  # several tiles, the last one partial
    plain, fast = layers(bias=True, dtype=torch.bfloat16)
    x = torch.randn(tokens, 48).bfloat16()
    with torch.inference_mode():
        out = fast(x)
    exact = x.float() @ plain.weight.float().t() + plain.bias.float()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), exact, atol=2e-2, rtol=2e-2)


def test_tiles_of_one_call_do_not_leak_into_the_next(monkeypatch):
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    (_, wide), (plain, narrow) = layers(n=300, k=64, dtype=torch.bfloat16), layers(dtype=torch.bfloat16)
    x = torch.randn(9, 48).bfloat16()
    with torch.inference_mode():
        wide(torch.randn(9, 64).bfloat16())
        torch.testing.assert_close(narrow(x), plain(x), atol=2e-2, rtol=2e-2)


def test_gradients_go_the_librarys_way():
    plain, fast = layers(bias=True)
    for layer in (plain, fast):
        layer(torch.ones(3, 48)).sum().backward()
    assert torch.equal(plain.weight.grad, fast.weight.grad)


def test_adapting_a_model_changes_neither_its_weights_nor_their_names_nor_its_logits():
    model = tiny_llama()
    before, ids = {k: v.clone() for k, v in model.state_dict().items()}, torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits
        adapted = adapt(model)
        assert adapted is model
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(type(m) is BlockLinear for m in model.modules() if isinstance(m, nn.Linear))
