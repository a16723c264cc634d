"""This room defines every logged number, reduces it over ranks and steps, and writes docs/METRICS.md."""
