"""Draft language models: a small causal LM with the target's vocabulary."""
