"""Which split of devices, and which schedule? A simulation of a job's schedule; docs/SIMULATION.md is its page."""
