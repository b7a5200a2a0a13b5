"""The frozen target."""
