"""Training of drafts. accelerate and wandb are imported here and nowhere below."""
