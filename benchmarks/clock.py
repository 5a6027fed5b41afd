"""Seconds by part of a program: each part's without those of the parts inside it, so that they add up."""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Clock:
    """Stops the part outside while one inside runs. Looks at one thread alone: that which made it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._open: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Everything in the block, but what is in a part of its own."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._switch()
        self._open.append(name)
        self.calls[name] += 1
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def watch(clock: Clock, part: str, place: str) -> None:
    """Time every call of `module:name` as this part. The name is the one callers look up: where it was imported to."""
    owner, name = find(place)
    setattr(owner, name, _timed(clock, part, getattr(owner, name)))


def find(place: str) -> tuple[Any, str]:
    """The module, class or task that holds `module:name`, and the last name; AttributeError where there is none."""
    module, path = place.split(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, import_module(module))
    getattr(owner, name)
    return owner, name


def _timed(clock: Clock, part: str, function: Any) -> Any:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.part(part):
            return function(*args, **kwargs)

    return timed
