"""What can be learned about a method by asking it on made-up tokens."""
