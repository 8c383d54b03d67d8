"""Who may ask for what, and when it is their turn: keys, checks, limits, places."""
