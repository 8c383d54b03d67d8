"""The sub-commands of ``taut``; each parses its arguments and calls one function of the rooms."""
