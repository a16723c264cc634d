"""This room holds the processes that score responses, and the service that talks to them."""
