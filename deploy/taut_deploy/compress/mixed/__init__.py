"""Mixed precision: which scheme each layer gets, by what it costs the model and what it saves."""
