"""This room holds the loop of supervised and preference learning."""
