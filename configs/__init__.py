"""The configuration: schema, loading, and the YAML files of the jobs."""
