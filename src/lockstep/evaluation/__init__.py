"""Means and metrics over a whole dataset, whatever the number of ranks."""
