"""Proof that an export does in a real server what the bundled engine measured."""
