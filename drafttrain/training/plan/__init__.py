"""What a recipe will cost, before anything is loaded."""
