"""This room holds the sending side of a weight sync: how a version of the weights leaves the trainer."""
