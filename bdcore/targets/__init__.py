"""The verifier's greedy tokens as rows. Reading them needs no decoder."""
