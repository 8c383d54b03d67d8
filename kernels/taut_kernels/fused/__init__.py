"""Memory-bound ops of a decoder layer, one op a file: norm, gated activation, rotary embedding."""
