"""Evaluation on its own, and reports of runs."""
