"""This room holds the group filters, one function per file, which say which responses of a group are trained on."""
