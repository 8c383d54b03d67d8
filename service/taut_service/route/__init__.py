"""Which worker answers: variants, balance, affinity, retries, hedges, breakers."""
