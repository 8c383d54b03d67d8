"""What a compression did to each layer, for people: ``report.md`` and ``report.html``.

``report.md`` is a function of the inputs and part of the checkpoint. ``report.html`` shows times,
too, in which equal runs differ: like the log it is outside the manifest's hashes.
"""
