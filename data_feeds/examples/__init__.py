"""What supervised and preference learning read: demonstrations, pairs and labels, mixed from sources."""
