"""The gated delta rule: linear attention whose state decays and is corrected token by token."""

from fp4jax.ops.gated_delta_rule.api import gated_delta_rule

__all__ = ["gated_delta_rule"]
