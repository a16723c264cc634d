"""Methods: one file each, pure tensors in, per-token loss out. Imports torch and nothing of ours outside this folder."""
