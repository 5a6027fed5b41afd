"""Buffers with two lengths: append, rollback, keep."""

import pytest
import torch

from bdcore.kv.storage import KVStorage, LayerStorage
from tests.unit.reference import rotate

INV_FREQ = 10000.0 ** (-torch.arange(0, 8, 2) / 8)


def block(first, count, heads=2, D=8):
    """Keys whose every coordinate says which token they belong to."""
    return torch.arange(first, first + count).float()[None, None, :, None].expand(1, heads, count, D).clone()


def filled(n, capacity=16, num_queries=0):
    layer = LayerStorage(capacity, num_queries)
    layer.update(block(0, n), -block(0, n))
    return layer


def tokens(layer):
    keys, values = layer.view()
    assert torch.equal(keys, -values)
    return keys[0, 0, :, 0].tolist()


def test_update_returns_everything_cached_in_order():
    layer = filled(3)
    keys, values = layer.update(block(3, 2), -block(3, 2))
    assert keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(values, -keys)
    assert layer.physical == layer.get_seq_length() == 5


@pytest.mark.parametrize(("n", "left"), [(0, 3), (1, 2), (3, 0)])
def test_rollback_forgets_exactly_the_newest_keys(n, left):
    """B05 (3)."""
    layer = filled(3)
    layer.rollback(n)
    assert tokens(layer) == list(range(left))


@pytest.mark.parametrize("n", [5, -1])
def test_rollback_of_more_than_is_cached_is_an_error(n):
    """B05 (3)."""
    layer = filled(3)
    with pytest.raises(AssertionError, match="rollback of"):
        layer.rollback(n)
    assert tokens(layer) == [0, 1, 2]


def test_rows_after_a_rollback_overwrite_the_forgotten_ones():
    layer = filled(4)
    layer.rollback(2)
    layer.update(block(9, 1), -block(9, 1))
    assert tokens(layer) == [0, 1, 9]


@pytest.mark.parametrize(("crop", "left"), [(0, 3), (-1, 2), (-3, 0)])
def test_crop_takes_the_number_of_tokens_to_remove_as_a_value_of_at_most_zero(crop, left):
    layer = filled(3)
    layer.crop(crop)
    assert tokens(layer) == list(range(left))


def test_an_append_beyond_the_capacity_is_an_error():
    with pytest.raises(AssertionError, match="cache of 4 keys asked to hold 5"):
        filled(5, capacity=4)


def test_keep_gathers_each_heads_own_keys_and_values():
    layer = filled(6)
    layer.keep(torch.tensor([[[0, 2, 5], [1, 4, 5]]]), None)
    keys, values = layer.view()
    assert keys[0, :, :, 0].tolist() == [[0, 2, 5], [1, 4, 5]]
    assert torch.equal(keys, -values)
    assert layer.physical == 3


def test_keep_with_frequencies_moves_keys_and_observed_queries_to_their_place_in_the_cache():
    layer = LayerStorage(16, num_queries=2)
    raw, raw_queries = torch.randn(1, 2, 6, 8), torch.randn(1, 4, 2, 8)
    layer.update(rotate(raw[0], torch.arange(6), INV_FREQ)[None], raw)
    layer.observe(rotate(raw_queries[0], torch.tensor([4, 5]), INV_FREQ)[None])
    index = torch.tensor([[[0, 2, 4, 5], [1, 3, 4, 5]]])
    layer.keep(index, INV_FREQ)
    keys, values = layer.view()
    unrotated = raw.gather(2, index[..., None].expand(-1, -1, -1, 8))
    torch.testing.assert_close(keys[0], rotate(unrotated[0], torch.arange(4), INV_FREQ), atol=1e-5, rtol=0)
    assert torch.equal(values, unrotated)
    torch.testing.assert_close(
        layer.queries[0], rotate(raw_queries[0], torch.tensor([2, 3]), INV_FREQ), atol=1e-5, rtol=0
    )


def test_observed_queries_are_the_newest_and_are_rolled_back_with_their_keys():
    layer = filled(0, num_queries=3)
    for first in (0, 2, 4):
        layer.update(block(first, 2), -block(first, 2))
        layer.observe(block(first, 2, heads=4))
    assert layer.queries[0, 0, :, 0].tolist() == [3, 4, 5]
    layer.rollback(1)
    assert layer.queries[0, 0, :, 0].tolist() == [3, 4]
    layer.rollback(0)
    assert layer.queries.shape[2] == 2


def test_logical_counts_fed_tokens_and_physical_cached_keys():
    cache = KVStorage(2, 16)
    for layer in cache.layers:
        layer.update(block(0, 6), -block(0, 6))
    cache.advance(6)
    for layer in cache.layers:
        layer.keep(torch.tensor([[[0, 4, 5]] * 2]), None)
    assert (cache.logical, cache.physical, cache.peak_physical) == (6, 3, 6)
    cache.rollback(2)
    assert (cache.logical, cache.physical) == (4, 1)


def test_bytes_are_those_of_the_buffers():
    cache = KVStorage(2, 16)
    assert cache.bytes() == 0
    for layer in cache.layers:
        layer.update(block(0, 3), -block(0, 3))
    assert cache.bytes() == 2 * 2 * (2 * 16 * 8) * 4
