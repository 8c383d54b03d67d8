"""Compares a variant's answers with its baseline's on live traffic, beside the requests."""
