"""Generation: records, engines, environments."""
