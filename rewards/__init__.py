"""Rewards: one file each, a plain function named as its file. Nothing here imports torch: scoring processes start fast."""
