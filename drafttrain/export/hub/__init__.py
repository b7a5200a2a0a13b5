"""Exports on a model hub: what is sent, what is refused, and the way back."""
