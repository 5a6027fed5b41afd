"""Speed against named peers: scripts that anyone can run, no tests."""
