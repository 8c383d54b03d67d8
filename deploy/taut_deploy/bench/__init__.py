"""``taut bench``: measurements with their comparison in the same run."""
