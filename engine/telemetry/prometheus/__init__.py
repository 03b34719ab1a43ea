"""Telemetry from a Prometheus-compatible API: one poller for all nodes that have no address of their own."""
