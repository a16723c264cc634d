"""Scripts that make data files and fetch or convert models; each runs offline: `python -m data_prep.<name>`."""
