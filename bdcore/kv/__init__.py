"""Keys and values: where they lie, which stay, at which positions, how they are read. Knows tensors, no models."""
