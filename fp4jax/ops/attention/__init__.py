"""ops/attention."""
