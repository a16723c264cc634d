"""A run on disk and on screen: its directory, its console, its logs, and what a resumed run reads."""
