"""What a recommendation chooses among: a setting, the scenes it was timed in, what was measured there."""

from dataclasses import dataclass

from bdcore.collapse.intervals import Estimate
from bdcore.collapse.words import FULL_BUDGET, budget_name


@dataclass(frozen=True)
class Setting:
    """What an engineer chooses."""

    method: str
    drafter: str | None
    budget: int
    """Keys per layer and head; -1: all."""
    policy: str
    position_mode: str
    gamma: int
    gamma_mode: str
    refresh: int = 0
    """Rounds after which the keys are chosen anew; 0: never."""
    drafter_key: str | None = None
    """Drafters of two runs may share a name: this tells them apart."""

    def __str__(self) -> str:
        drafter = f" with drafter {self.drafter}" if self.drafter else ""
        drafter += f" ({self.drafter_key})" if self.drafter and self.drafter_key else ""
        refresh = f" chosen anew every {self.refresh} rounds" if self.refresh else ""
        return (
            f"{self.method}{drafter}, budget {budget_name(self.budget)}, policy {self.policy}{refresh}, "
            f"{self.position_mode} positions, gamma {self.gamma} ({self.gamma_mode})"
        )


@dataclass(frozen=True)
class Scene:
    """What an engineer does not choose: the text that comes, and how it is drawn."""

    corpus: str
    workload: str
    temperature: float = 0.0

    def __str__(self) -> str:
        return f"{self.corpus}, {self.workload}" + (f" at {self.temperature:g}" if self.temperature else "")


@dataclass(frozen=True)
class Option:
    """A setting as it was measured in one scene, at one context, by one run."""

    setting: Setting
    scene: Scene
    context: int
    kv_bytes: int
    """Of the drafter's cache at its peak, for one sequence."""
    cached: int
    """Keys per layer and head in it; 0: not known, or no cache."""
    speedup: Estimate
    """Decoding, against the verifier alone."""
    acceptance: Estimate
    run: str

    @property
    def grows(self) -> bool:
        """Whether its cache has a key for every token: the full one, or one whose budget bounds what is read alone."""
        return self.setting.budget == FULL_BUDGET or self.cached > self.setting.budget + self.setting.gamma + 1

    def bytes_at(self, context: int) -> int:
        """`kv_bytes` at another context: by the token where it grows, else as large as its budget."""
        if not self.grows:
            return self.kv_bytes
        keys = max(self.cached, self.context) + max(self.setting.budget, 0)
        return round(self.kv_bytes * (keys + context - self.context) / keys)
