"""The driver loop, the trainer, the actors, weight synchronisation, run directories."""
