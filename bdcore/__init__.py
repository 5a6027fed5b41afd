"""BudgetDraft's library: sparse KV caches, speculative decoding, multi-view drafter training. No Prefect, no MLflow."""
