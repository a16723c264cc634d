"""This room reads the rows of files, data sets and generators."""
