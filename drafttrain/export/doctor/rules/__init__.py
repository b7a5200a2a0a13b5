"""The rules, one small function each, by subject."""
