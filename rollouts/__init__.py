"""This room generates: engines, environments and filters."""
