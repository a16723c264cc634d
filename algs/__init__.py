"""This package holds the methods, one file each: tensors in, per-token loss out. It imports torch and itself only."""
