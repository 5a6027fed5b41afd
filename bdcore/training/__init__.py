"""Multi-view training: sparse views of a prefix, the two losses, the resumable loop."""
