"""Wiring: the four stages as Prefect flows, the pipeline that chains them, and the console script."""
