"""This room holds the rules that span several keys of a configuration."""
