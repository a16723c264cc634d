"""The loop of supervised and preference learning."""
