"""What a user of the instruments can get wrong."""


class InstrumentError(ValueError):
    """A subject, size or device that cannot be had; one line that names it and the way out."""
