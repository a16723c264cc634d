"""How a name in a configuration becomes code, ours or the user's, and how its parameters are checked."""
