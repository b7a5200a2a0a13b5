"""EAGLE: drafts that predict the target's features."""
