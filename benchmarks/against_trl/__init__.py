"""Our default job against trl's GRPOTrainer, and supervised and preference learning against its trainers."""
