"""Drafts made elsewhere, read into the intermediate form."""
