"""This room reads, splits and renders training and held-out prompts, and draws them in a repeatable order."""
