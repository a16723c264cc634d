"""Every number that is logged: its definition, its reduction over ranks and steps, its page in the docs."""
