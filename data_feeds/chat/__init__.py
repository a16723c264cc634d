"""Chat templates, and which tokens of a chat are the assistant's."""
