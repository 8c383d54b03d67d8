"""``report.html``: a validation as one page, without a script or another file."""
