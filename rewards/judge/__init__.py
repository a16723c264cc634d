"""The client that asks a language model for a verdict, and its cache."""
