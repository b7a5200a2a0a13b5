"""Medusa: heads on the target's last state."""
