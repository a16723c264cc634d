"""Rewards: each file holds one plain function with the file's name. None imports torch on loading, for a fast start."""
