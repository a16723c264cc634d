"""The schema: what a configuration may say, one file a block."""
