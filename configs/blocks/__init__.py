"""This room holds the schema, which says what a configuration may contain: one file per block."""
