"""Train, measure and export the drafts of speculative decoding."""

__version__ = "0.1.0"
