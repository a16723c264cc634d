"""This package reads data sets, applies chat templates, samples prompts and examples, and packs them."""
