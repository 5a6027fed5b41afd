"""Moving a cached key is a rotation by the difference of positions."""

import pytest
import torch

from bdcore.kv.positions import rotate_half, shift
from tests.conftest import tiny_llama
from tests.unit.reference import rotate

INV_FREQ = 10000.0 ** (-torch.arange(0, 16, 2) / 16)


def keys(count=6):
    return torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(0))


def test_rotate_half_pairs_coordinate_i_with_i_plus_half():
    assert rotate_half(torch.tensor([1.0, 2, 3, 4])).tolist() == [-3, -4, 1, 2]


def test_keys_moved_to_0_to_31_equal_keys_rotated_there_directly():
    """B11."""
    raw, origin = keys(32), torch.arange(128)[torch.randperm(128, generator=torch.Generator().manual_seed(1))[:32]]
    origin = origin.sort().values
    cached = rotate(raw[0], origin, INV_FREQ)[None]
    moved = shift(cached, (torch.arange(32) - origin).expand(1, 2, 32), INV_FREQ)
    torch.testing.assert_close(moved[0], rotate(raw[0], torch.arange(32), INV_FREQ), atol=1e-4, rtol=0)


def test_the_rotation_is_the_models_own():
    model = tiny_llama()
    raw, positions = keys(), torch.arange(40, 46)
    cos, sin = model.model.rotary_emb(raw, positions[None])
    own = raw * cos[:, None] + rotate_half(raw) * sin[:, None]
    moved = shift(raw, positions.expand(1, 2, 6), model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(moved, own, atol=1e-5, rtol=0)


def test_a_move_by_nothing_changes_nothing():
    assert torch.equal(shift(keys(), torch.zeros(1, 2, 6), INV_FREQ), keys())


def test_there_and_back_is_where_it_was():
    by = torch.full((1, 2, 6), 97)
    torch.testing.assert_close(shift(shift(keys(), by, INV_FREQ), -by, INV_FREQ), keys(), atol=1e-4, rtol=0)


def test_scores_depend_on_the_difference_of_positions_only():
    q, k = keys(1), keys(1).flip(-1)
    near = shift(q, torch.tensor([[[9], [9]]]), INV_FREQ) * shift(k, torch.tensor([[[4], [4]]]), INV_FREQ)
    far = shift(q, torch.tensor([[[105], [105]]]), INV_FREQ) * shift(k, torch.tensor([[[100], [100]]]), INV_FREQ)
    torch.testing.assert_close(near.sum(-1), far.sum(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_keys_is_kept(dtype):
    assert shift(keys().to(dtype), torch.ones(1, 2, 6), INV_FREQ).dtype == dtype
