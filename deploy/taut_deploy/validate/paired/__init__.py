"""Statistics of two models that answered the same items: tests and intervals, pure functions."""
