"""The workers' side: connections to them, probes, their load, where they come from."""
