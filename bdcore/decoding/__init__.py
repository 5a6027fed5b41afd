"""Speculative decoding: propose, verify, accept, commit. A method is a drafter, a policy, positions and gamma, by name."""
