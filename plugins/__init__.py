"""This room turns a name in a configuration into code, ours or the user's, and checks the parameters given to it."""
