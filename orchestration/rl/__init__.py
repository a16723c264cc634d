"""This room holds the loop of reinforcement learning: the driver, the queue of rollouts, weight sync and its check."""
