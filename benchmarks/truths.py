"""Synthetic documents of known truth: acceptance, seconds, texts that loop, prompts that fail.

A document's acceptance is drawn from a beta distribution, its accepted tokens from a binomial one. Settings measured on
the same documents share their luck: a Gaussian copula of the given correlation joins a document's acceptances. Drafted
tokens and spread between documents are about those of the CPU study (16 positions, gamma 1).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from scipy import integrate, special, stats

from bdcore.collapse.pairing import Sums

Rng = np.random.Generator
Tables = list[list[Sums]]
Draw = Callable[[Rng, Sequence[float], int, float], Any]
"""Of a generator, the level of each setting, the number of documents and their correlation."""

DRAFTED, CONCENTRATION = 16, 6.0
ACCEPTANCE, GAMMA, NOISE = 0.45, 4, 0.02
"""Of timed documents: acceptance, drafts per round, and the clock's own spread."""
LOOPING = 0.95
"""Acceptance on a text that loops."""
TOKENS, VOCABULARY, PERIOD = 256, 5000, 8
"""Of a text, and of the loop in it."""


def _chances(rng: Rng, acceptance: Sequence[float], documents: int, correlation: float) -> np.ndarray:
    """Settings x documents: each document's own acceptance."""
    mean = np.array(acceptance)[:, None]
    common, own = rng.standard_normal((1, documents)), rng.standard_normal((len(acceptance), documents))
    luck = special.ndtr(np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own)
    return special.betaincinv(mean * CONCENTRATION, (1 - mean) * CONCENTRATION, luck)


def _counted(rng: Rng, chances: np.ndarray) -> Tables:
    return [[(float(a), float(DRAFTED)) for a in row] for row in rng.binomial(DRAFTED, chances)]


def draw(rng: Rng, acceptance: Sequence[float], documents: int, correlation: float) -> Tables:
    """(accepted, drafted) of the same documents under each setting."""
    return _counted(rng, _chances(rng, acceptance, documents, correlation))


@cache
def _rounds_per_token() -> float:
    """Rounds per token over all documents there could be, at `ACCEPTANCE`."""
    shape = stats.beta(ACCEPTANCE * CONCENTRATION, (1 - ACCEPTANCE) * CONCENTRATION)
    return float(integrate.quad(lambda a: shape.pdf(a) / (1 + GAMMA * a), 0, 1)[0])


def timed(rng: Rng, speedups: Sequence[float], documents: int, correlation: float) -> Tables:
    """(seconds of `ar`, seconds of the method) of the same documents: faster where more of its drafts are accepted."""
    tokens = 1 + GAMMA * _chances(rng, [ACCEPTANCE] * len(speedups), documents, correlation)
    noise = np.exp(NOISE * rng.standard_normal((2, *tokens.shape)))
    method = noise[1] / (np.array(speedups)[:, None] * tokens * _rounds_per_token())
    return [list(zip(*row, strict=True)) for row in np.stack([noise[0], method], 1).tolist()]


def looping(shares: Sequence[float]) -> Draw:
    """Acceptance and whether the text loops, where that share of the texts of each setting does."""

    def drawn(
        rng: Rng, acceptance: Sequence[float], documents: int, correlation: float
    ) -> tuple[Tables, list[list[bool]]]:
        loops = rng.random((len(acceptance), documents)) < np.array(shares)[:, None]
        chances = np.where(loops, LOOPING, _chances(rng, acceptance, documents, correlation))
        return _counted(rng, chances), loops.tolist()

    return drawn


def failing(share: float, *, settings: Sequence[int], weakest: bool = False) -> Draw:
    """Acceptance, where that share of the prompts fails under some of the settings: any, or those accepted least."""

    def drawn(rng: Rng, acceptance: Sequence[float], documents: int, correlation: float) -> Tables:
        tables = draw(rng, acceptance, documents, correlation)
        for setting in settings:
            by = [a or 0.0 for a, _ in tables[setting]] if weakest else rng.random(documents)
            for document in np.argsort(by, kind="stable")[: round(share * documents)]:
                tables[setting][document] = (None, None)
        return tables

    return drawn


def text(*, counter: bool = False) -> Draw:
    """A text of Zipf's law of which a share at the end, its level, repeats a few tokens; with a `counter` one of these
    is another each time."""

    def drawn(rng: Rng, share: Sequence[float], documents: int, correlation: float) -> list[int]:
        sound = TOKENS - round(share[0] * TOKENS)
        chance = 1 / np.arange(1, VOCABULARY + 1)
        found = rng.choice(VOCABULARY, TOKENS, p=chance / chance.sum()).tolist()
        for i in range(sound + PERIOD, TOKENS):
            if not (counter and (i - sound) % PERIOD == 0):
                found[i] = found[i - PERIOD]
        return found

    return drawn
