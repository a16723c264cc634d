"""The records in which the rooms meet: prompts, responses, groups."""
