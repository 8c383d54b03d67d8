"""Pages that ``taut report`` opens: which one a folder has, and that of a rollout."""
