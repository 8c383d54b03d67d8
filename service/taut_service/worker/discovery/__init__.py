"""Where the workers of a variant come from when the configuration does not list them.

``choose`` makes the watch that a variant's ``discover`` asks for. A watch runs beside the requests,
knows nothing of them, and calls ``apply`` with the whole set of workers whenever that set has
changed.
"""
