"""This room turns a command line into a checked job, or into one message with all mistakes; --dry-run stops there."""
