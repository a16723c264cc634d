"""This room turns a YAML file and --set into a checked configuration, or into messages with a remedy each."""
