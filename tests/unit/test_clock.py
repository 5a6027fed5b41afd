"""Seconds by part add up, whatever is inside what; the parts of a grid's time are where they are looked for."""

import threading
import time
from types import SimpleNamespace

import pytest

from benchmarks.clock import Clock, find, watch
from benchmarks.orchestration import GROWS, MODELS, ONCE, PARTS, REST, START, Found, table


@pytest.fixture
def ticks(monkeypatch):
    """A clock that says what the test puts in."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    return now


def test_a_part_does_not_count_the_parts_inside_it(ticks):
    clock = Clock()
    with clock.part("outer"):
        ticks.s = 1
        with clock.part("inner"):
            ticks.s = 4
            with clock.part("outer"):
                ticks.s = 9
        ticks.s = 16
    assert clock.seconds == {"outer": 1 + 5 + 7, "inner": 3}
    assert clock.calls == {"outer": 2, "inner": 1}


def test_a_part_ends_when_its_block_raises_and_other_threads_are_left_out(ticks):
    clock = Clock()
    with clock.part("outer"):
        with pytest.raises(KeyError), clock.part("inner"):
            ticks.s = 2
            raise KeyError
        ticks.s = 3
        other = threading.Thread(target=lambda: clock.part("inner").__enter__())
        other.start()
        other.join()
        ticks.s = 5
    assert clock.seconds == {"outer": 3, "inner": 2}


def test_a_watched_function_gives_what_it_gave(monkeypatch):
    monkeypatch.setattr(Found, "of", Found.of)  # put back after the test
    clock = Clock()
    watch(clock, "sums", "benchmarks.orchestration:Found.of")
    assert Found({part.name: 2.0 for part in PARTS}, 0.0).of(START) == 4.0
    assert clock.calls == {"sums": 1}


@pytest.mark.parametrize("place", [place for part in PARTS for place in part.places])
def test_every_part_of_a_grid_is_where_it_is_looked_for(place):
    owner, name = find(place)
    assert callable(getattr(owner, name))


def test_the_table_adds_up_and_shares_are_of_the_seconds_in_models():
    found = Found({part.name: 2.0 for part in PARTS}, 0.0)
    models = sum(part.kind == MODELS for part in PARTS)
    assert found.of(MODELS, GROWS, ONCE, START) == 2.0 * len(PARTS)
    assert found.share(GROWS, ONCE, START) == (len(PARTS) - models) / models
    assert REST.name in table(found) and f"{2.0 * len(PARTS):.2f}" in table(found).splitlines()[-1]
