"""Rows of files, data sets and generators."""
