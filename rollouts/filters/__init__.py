"""Group filters: one file each, a plain function named as its file, which says what of a group is trained on."""
