"""This room holds the vLLM engines as the driver sees them: the actor, its handle, the pool."""
