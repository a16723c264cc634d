"""This room holds the recipes, one file per data set; a new file here is a new recipe."""
