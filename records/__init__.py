"""This room holds the records that the other rooms exchange: prompts, responses, groups."""
