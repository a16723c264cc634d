"""This room finds out what a method does by running it on made-up tokens."""
