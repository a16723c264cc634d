"""Training and held-out prompts: read, split, rendered, and drawn in a repeatable order."""
