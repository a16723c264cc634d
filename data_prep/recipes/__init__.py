"""One file per data set; a new file here is a new recipe."""
