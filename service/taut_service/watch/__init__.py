"""What is seen from outside: metrics, logs, traces, health, the admin API, the drain."""
