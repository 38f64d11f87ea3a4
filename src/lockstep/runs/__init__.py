"""Reads the folders of runs, also while they are written to: for reports, pages and terminals. Needs no torch."""
