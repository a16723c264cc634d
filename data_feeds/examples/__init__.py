"""This room reads the demonstrations, pairs and labels of supervised and preference learning, and mixes sources."""
