"""ops/w4a16_grouped_matmul."""
