"""Thin tasks: open paths, call bdcore, write an artifact, return a reference. One stage, one file."""
