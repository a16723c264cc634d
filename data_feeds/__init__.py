"""Data sets, chat templating, sampling of prompts, and packing."""
