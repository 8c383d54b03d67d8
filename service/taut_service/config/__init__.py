"""The configuration file and its reload while requests run."""
