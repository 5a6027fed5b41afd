"""Speculative decoding: propose, verify, accept, commit; and the methods of the grid by name."""
