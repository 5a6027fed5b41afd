"""How many tokens to draft in a round: `fixed`, `confidence`, or `adaptive`.

No rule looks at what it is about to draft before drawing it, so the output distribution stays the verifier's own.
"""

from dataclasses import dataclass

MODES = ("fixed", "confidence", "adaptive")


@dataclass(frozen=True)
class DraftRule:
    """The rule as configuration; `start` gives the state of one sequence. `gamma` is the most it ever drafts."""

    mode: str = "fixed"
    gamma: int = 5
    threshold: float = 0.4
    """`confidence`: drafting stops where the drafter's best probability is below this."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"gamma_mode = {self.mode!r}: legal are {', '.join(MODES)}")
        if self.gamma < 0:
            raise ValueError(f"gamma = {self.gamma}: at least 0 (0 is the verifier alone)")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold = {self.threshold}: a probability, between 0 and 1")

    def start(self) -> "DraftLength":
        if self.mode == "adaptive":
            return Adaptive(self.gamma)
        return DraftLength(self.gamma, self.threshold if self.mode == "confidence" else None)


class DraftLength:
    """`fixed` and `confidence`: always `gamma`, cut short where the drafter is unsure."""

    def __init__(self, gamma: int, threshold: float | None = None) -> None:
        self.gamma, self.threshold = gamma, threshold

    def next(self) -> int:
        """Most tokens to draft in the coming round."""
        return self.gamma

    def goes_on(self, confidence: float) -> bool:
        """Whether to draft a token whose best candidate has this probability."""
        return self.threshold is None or confidence >= self.threshold

    def learn(self, *, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        """What came of the round."""


class Adaptive(DraftLength):
    """The draft length with the most tokens per second, by measured acceptance and measured costs.

    Speculation is off (length 0) where no length beats the verifier alone. After a pause one token is drafted, as if
    nothing were known of acceptance; the pause doubles each time that does not help. Expected tokens of a round with
    draft length g: 1 + sum of a_1 ... a_i over i <= g, where a_i is the acceptance at position i given that all before
    were accepted (Leviathan et al. 2023, per position).
    """

    DECAY = 0.9  # of past rounds, per round
    PAUSES = (8, 64)  # plain rounds before speculation is tried again: first, most

    def __init__(self, gamma: int) -> None:
        super().__init__(gamma)
        self._tried, self._kept = [0.0] * gamma, [0.0] * gamma
        self._draft_s: float | None = None
        # Decayed sums of the line verify_s = a + b * block.
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._rounds = 0
        self._since = 0  # rounds with speculation since the last pause
        self._wait = 0  # plain rounds left of the pause
        self._pause = self.PAUSES[0] // 2

    def next(self) -> int:
        if self.gamma == 0 or self._wait:
            return 0
        if self._rounds < 2:  # two block lengths make a line of costs
            return (self.gamma, max(1, self.gamma // 2))[self._rounds] if self.gamma > 1 else 1 - self._rounds
        return self._best() if self._since else min(self._best(), 1)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, verify_s: float) -> None:
        # The first draft after a pause also reads what was missed: it says nothing of the cost of a draft.
        self._learn_cost(drafted, draft_s if self._since or self._draft_s is None else None, verify_s)
        self._rounds += 1
        if self._wait:
            self._wait -= 1
            return
        self._since += 1
        for i in range(self.gamma):
            tried = i < min(drafted, accepted + 1)  # put to the test
            self._tried[i] = self.DECAY * self._tried[i] + tried
            self._kept[i] = self.DECAY * self._kept[i] + (tried and i < accepted)
        if self._rounds > 2 and not self._best():
            helped = self._since > self.PAUSES[0]
            self._pause = self.PAUSES[0] if helped else min(2 * self._pause, self.PAUSES[1])
            self._wait, self._since = self._pause, 0
            self._tried, self._kept = [0.0] * self.gamma, [0.0] * self.gamma

    def _learn_cost(self, drafted: int, draft_s: float | None, verify_s: float) -> None:
        if drafted and draft_s is not None:
            one = draft_s / drafted
            self._draft_s = one if self._draft_s is None else self.DECAY * self._draft_s + (1 - self.DECAY) * one
        block, decay = drafted + 1, self.DECAY
        for name, value in (("n", 1.0), ("x", block), ("y", verify_s), ("xx", block**2), ("xy", block * verify_s)):
            setattr(self, f"_{name}", decay * getattr(self, f"_{name}") + value)

    def _verify_s(self, block: int) -> float:
        spread = self._n * self._xx - self._x**2
        slope = max(0.0, (self._n * self._xy - self._x * self._y) / spread) if spread > 1e-9 else 0.0
        return max(1e-9, self._y / self._n + slope * (block - self._x / self._n))

    def _best(self) -> int:
        """argmax over g of expected tokens per second; ties go to the shorter draft."""
        best, best_rate, tokens, chance = 0, 1.0 / self._verify_s(1), 1.0, 1.0
        acceptance = 1.0
        for g in range(1, self.gamma + 1):
            # One imagined trial goes as at the position before, at the first it succeeds.
            acceptance = (self._kept[g - 1] + acceptance) / (self._tried[g - 1] + 1)
            chance *= acceptance
            tokens += chance
            rate = tokens / (g * (self._draft_s or 0.0) + self._verify_s(g + 1))
            if rate > best_rate * (1 + 1e-9):
                best, best_rate = g, rate
        return best
