"""Simulate a job's schedule, to choose a split of devices and a schedule; see docs/running/SIMULATION.md."""
