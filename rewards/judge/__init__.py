"""GroupRequest a language model for a verdict: the client and its cache."""
