"""ops/w4a16_matmul."""
