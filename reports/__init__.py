"""Reads result rows (Parquet) and turns them into views, figures and one report. Measures nothing itself."""
