"""This room evaluates models, makes the reports of runs, and explains methods."""
