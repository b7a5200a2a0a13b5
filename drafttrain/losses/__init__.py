"""What a draft is trained on: which labels count, the terms of the loss, and their weighted sum."""
