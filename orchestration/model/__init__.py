"""This room holds the policy as a network and as files: packed attention, the head, LoRA and checkpoints."""
