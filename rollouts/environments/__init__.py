"""This room holds the environments, one file each, from a single question to a world of many turns."""
