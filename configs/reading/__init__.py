"""From a YAML file and --set to a checked configuration, or to messages that name the key and the way out."""
