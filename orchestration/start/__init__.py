"""From a command line to a checked job, or to one message that says what is wrong: arguments, preflight, dry run."""
