"""W4A16 matmul as a Pallas kernel for NVIDIA GPUs (Triton backend)."""

from __future__ import annotations

from fp4jax.ops.dispatch import MatmulSpec


def unsupported_reason(spec: MatmulSpec) -> str | None:
    """Why the kernel cannot serve ``spec``, or None."""
    return "the kernel is not written yet"


def slower_reason(spec: MatmulSpec) -> str | None:
    """Why another implementation serves ``spec`` faster, or None."""
    return None


def matmul_triton(x, w, *, bias=None, out_dtype):
    raise NotImplementedError
