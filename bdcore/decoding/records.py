"""What decoding leaves behind: one record per verify round, and the result of one generation."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Round:
    """One propose-verify-accept-commit. Times in seconds, sizes in bytes."""

    drafted: int
    accepted: int
    emitted: int
    """Accepted tokens and the verifier's own, cut at EOS or the length limit."""
    draft_s: float
    select_s: float
    verify_s: float
    overhead_s: float
    drafter_cached: int
    """Keys per layer and head after the round."""
    drafter_kv_bytes: int
    verifier_kv_bytes: int


@dataclass(frozen=True)
class Decoded:
    """One generation after its prompt."""

    tokens: list[int]
    finish_reason: str
    """`eos`, `stop` (a stop string) or `length`."""
    rounds: list[Round]
    prefill_s: float
    """Verifier reading the prompt."""
    draft_prefill_s: float
    """Drafter reading the prompt, selection included."""
    decode_s: float
    """From the first token to the last."""
    drafter_cached_peak: int = 0
    """Most keys per layer and head at any time, block in flight included."""
    drafter_kv_bytes: int = 0
    verifier_kv_bytes: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """[i]: rounds in which draft position i was accepted."""
    drafted_at: list[int] = field(default_factory=list)
    """[i]: rounds in which draft position i was drafted."""
    gaps: list[float] = field(default_factory=list)
    """Verifier alone: difference of its two best logits at each token, to tell a near-tie from a fault."""
    gap_steps: list[float] = field(default_factory=list)
    """The same in rounding steps of the logits' dtype at the best one."""

    @property
    def ttft_s(self) -> float:
        """Time to first token: the verifier's prefill. Drafting starts after it."""
        return self.prefill_s

    @property
    def wall_s(self) -> float:
        return self.prefill_s + self.draft_prefill_s + self.decode_s
