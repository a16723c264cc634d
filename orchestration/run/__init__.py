"""This room holds a run on disk and on screen: its directory, console and logs, and how it is resumed."""
