"""The policy as a network and as files: packed attention, the head, LoRA, checkpoints."""
