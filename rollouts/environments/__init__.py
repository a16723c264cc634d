"""Environments: one file each; what a response meets, from a single question to a world of many turns."""
