"""This room holds the configuration: schema, loading, rules, and the YAML files of the jobs."""
