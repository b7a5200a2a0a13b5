"""What a draft learns from: states of the frozen target, computed on the fly or read from disk."""
