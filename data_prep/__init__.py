"""This room makes data files and fetches or converts models: `python -m data_prep` lists what there is."""
