"""The processes that score responses, and the service that talks to them."""
