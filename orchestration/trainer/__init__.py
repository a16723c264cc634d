"""This room holds one trainer rank, the handle on all ranks, and the making of an update's batch."""
