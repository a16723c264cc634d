"""The loop of reinforcement learning and what only it needs: the queue of rollouts, weight sync and its proof."""
