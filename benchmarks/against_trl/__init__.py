"""Compare our default job with trl's GRPOTrainer, and supervised and preference learning with its other trainers."""
