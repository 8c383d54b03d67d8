"""Tasks: items with a right answer, given to both models, compared item by item."""
