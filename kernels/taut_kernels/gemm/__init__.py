"""Matrix products over compressed weights, one operation a file."""
