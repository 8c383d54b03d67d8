"""Requests and tokens a minute, per API key: token buckets in memory or in a shared Redis.

``estimate`` prices a request before it is answered, ``bucket`` is the arithmetic, ``memory`` and
``redis_store`` keep the buckets, ``limiter`` turns what they say into answers and headers.
"""
