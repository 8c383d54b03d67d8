"""``taut shrink``: the smallest checkpoint of a model that a policy passes.

Candidates are laid out by predicted size (:mod:`.candidates`), tried from the smallest on
(:mod:`.walk`) and kept in a ledger (:mod:`.ledger`), so that no run repeats another's work.
"""
