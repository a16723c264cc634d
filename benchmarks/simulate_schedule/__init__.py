"""Which split of devices, and which schedule? A simulation of a job's schedule; see docs/running/SIMULATION.md."""
