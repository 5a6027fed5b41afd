"""A causal language model over its own cache: loading, slicing a drafter, prefill, step, roll back."""
