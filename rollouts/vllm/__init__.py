"""This room holds all contact with vLLM: the engine, its settings, and the receiving side of a weight sync."""
