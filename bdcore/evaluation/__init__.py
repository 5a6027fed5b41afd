"""The grid: which cells there are, and the measurement of one prompt under every cell."""
