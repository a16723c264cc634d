"""One trainer rank, all ranks as one handle, and what an update's batch is made of."""
