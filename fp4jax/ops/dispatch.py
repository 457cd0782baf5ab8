"""Choosing a backend, once, for every op that has several; ``explain`` shows the same decision.

The platform is that of the lowering, not of the process: a jitted call is traced with one branch
for CUDA and one for the rest, and the compiler keeps the one it lowers for. So an array that sits
on the CPU never meets a GPU kernel, and a CPU-only machine can lower for CUDA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

from fp4jax.errors import FormatError, UnsupportedError
from fp4jax.marlin import MarlinWeight

KERNEL_PLATFORM = "cuda"
"""The lowering platform that has kernels of its own; every other one takes XLA."""

FLOAT_DTYPES = ("bfloat16", "float16", "float32")


class Spec(Protocol):
    """Everything that a choice of backend may depend on: a frozen dataclass with these fields."""

    @property
    def op(self) -> str:
        """Name of the public function."""

    @property
    def platform(self) -> str:
        """Lowering platform: "cuda", "rocm", "cpu", "tpu", …"""

    @property
    def device_kind(self) -> str | None:
        """What the device calls itself, None where it is not known."""

    def describe(self) -> str:
        """Sizes and dtypes, for people."""


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """Everything that a choice of backend may depend on. Static and hashable.

    Attributes:
      op: name of the public function.
      m: rows of x once its leading axes are flattened.
      n: output features.
      k: input features.
      x_dtype: name of x's dtype.
      out_dtype: name of the result's dtype.
      shards: output features of each fused shard.
      layout: layout of the repacked weight.
      experts: matrices in the stack, None for the plain op.
      platform: lowering platform: "cuda", "rocm", "cpu", "tpu", …
      device_kind: what the device calls itself, None where it is not known.
    """

    op: str
    m: int
    n: int
    k: int
    x_dtype: str
    out_dtype: str
    shards: tuple[int, ...]
    layout: str
    experts: int | None
    platform: str
    device_kind: str | None

    def describe(self) -> str:
        """Sizes and dtypes, for people."""
        experts = "" if self.experts is None else f" experts={self.experts}"
        return f"M={self.m} N={self.n} K={self.k}{experts} {self.x_dtype} -> {self.out_dtype}"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One backend of an op.

    Attributes:
      name: what ``implementation=`` calls it.
      unsupported_reason: why it cannot serve a spec, or None.
      slower_reason: why another one serves it faster, or None; ignored when it is forced.
    """

    name: str
    unsupported_reason: Callable[[Any], str | None]
    slower_reason: Callable[[Any], str | None]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why. ``str()`` is meant for people.

    Attributes:
      spec: what was asked.
      choice: name of the backend, None where nothing (or not the forced one) can serve the call.
      reason: why it was chosen, or why there is none.
      candidates: (name, verdict) of every backend, in order of preference.
    """

    spec: Spec
    choice: str | None
    reason: str
    candidates: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        s = self.spec
        kind = "" if s.device_kind is None else f" ({s.device_kind})"
        head = (
            f"{s.op}: {self.choice or 'no implementation'} ({self.reason})\n"
            f"  {s.describe()} on {s.platform}{kind}"
        )
        return "\n".join([head, *(f"  {name}: {verdict}" for name, verdict in self.candidates)])


def choose(
    spec: Spec, candidates: tuple[Candidate, ...], implementation: str | None
) -> Explanation:
    """The decision: the forced backend, else the first that can serve and is not slower.

    Raises:
      UnsupportedError: ``implementation`` is not the name of a candidate.
    """
    names = tuple(c.name for c in candidates)
    if implementation is not None and implementation not in names:
        raise UnsupportedError(
            f"{spec.op}: no implementation {implementation!r}; use one of {list(names)} or None"
        )
    choice, reason, verdicts = None, "no candidate can serve these inputs", []
    for c in candidates:
        unsupported = c.unsupported_reason(spec)
        slower = c.slower_reason(spec)
        if unsupported is not None:
            verdict = f"cannot: {unsupported}"
        elif slower is not None:
            verdict = f"can, but {slower}"
        else:
            verdict = "can"
        verdicts.append((c.name, verdict))
        if implementation is not None:
            if c.name == implementation:
                choice = c.name if unsupported is None else None
                reason = "asked for by name" if unsupported is None else unsupported
        elif choice is None and unsupported is None and slower is None:
            choice, reason = c.name, "fastest that can serve these inputs"
    return Explanation(spec, choice, reason, tuple(verdicts))


def platform_of(x: object) -> tuple[str, str | None]:
    """Lowering platform and device kind that a call on ``x`` would meet outside of any jit.

    A concrete array's own device; for tracers and shapes, the default device.
    """
    devices: list = []
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        devices = list(x.devices())
    device = devices[0] if devices else jax.local_devices()[0]
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return platform, device.device_kind


def kernel_device_kind() -> str | None:
    """Kind of this process's first CUDA device, None where there is none (or it is unknown)."""
    platform, kind = platform_of(None)
    return kind if platform == KERNEL_PLATFORM else None


def run(
    spec: Any,
    candidates: tuple[Candidate, ...],
    implementation: str | None,
    bodies: dict[str, Callable[..., Any]],
    *operands: Any,
) -> Any:
    """Calls the chosen backend's body, by lowering platform.

    Where the forced backend cannot serve a platform, that branch fails when it is lowered.

    Args:
      spec: a :class:`Spec`.
      candidates: in order of preference.
      implementation: name of the forced one, or None.
      bodies: what computes the result, the same pytree whatever computes it, by name.
      operands: of the bodies; the first is an array.

    Raises:
      UnsupportedError: no lowering platform could run the forced backend.
    """

    def body(platform: str, device_kind: str | None) -> tuple[str, Callable[..., Any]]:
        asked = dataclasses.replace(spec, platform=platform, device_kind=device_kind)
        found = choose(asked, candidates, implementation)
        if found.choice is not None:
            return found.choice, bodies[found.choice]
        message = f"{spec.op}: implementation {implementation!r} cannot serve this: {found.reason}"
        return message, lambda *operands: _refuse(message, operands, bodies)

    kernel_name, kernel = body(KERNEL_PLATFORM, kernel_device_kind())
    other_name, other = body(*_other_platform())
    if kernel_name == other_name:
        return kernel(*operands)
    if kernel_name not in bodies and other_name not in bodies:
        # Refused everywhere: say what is wrong with the inputs, and now, not when lowered.
        raise UnsupportedError(kernel_name)
    return jax.lax.platform_dependent(*operands, default=other, **{KERNEL_PLATFORM: kernel})


def _refuse(message: str, operands: tuple, bodies: dict[str, Callable[..., Any]]) -> Any:
    """A result of the right shape, which fails to lower."""
    shapes = jax.eval_shape(next(reversed(bodies.values())), *operands)
    return jax.tree.map(
        lambda s: _refuse_p.bind(operands[0], message=message, shape=s.shape, dtype=s.dtype), shapes
    )


def _other_platform() -> tuple[str, str | None]:
    platform, kind = platform_of(None)
    return ("cpu", None) if platform == KERNEL_PLATFORM else (platform, kind)


# Stands where a forced backend cannot run, and says so when (and only when) it is lowered.
_refuse_p = Primitive("w4a16_refused")


@_refuse_p.def_abstract_eval
def _refuse_abstract(x, *, message, shape, dtype):
    del x, message
    return jax.core.ShapedArray(shape, jnp.dtype(dtype))


def _refuse_lowering(ctx, x, *, message, shape, dtype):
    del ctx, x, shape, dtype
    raise UnsupportedError(message)


mlir.register_lowering(_refuse_p, _refuse_lowering)


def check_operands(
    op: str, x: Float[Array, "*m k"] | jax.ShapeDtypeStruct, w: MarlinWeight, out_dtype
) -> jnp.dtype:
    """Refuses operands that no backend could serve; gives the result's dtype.

    Raises:
      FormatError: ``w`` is no repacked weight, or shapes or dtypes do not fit; both are named.
    """
    if not isinstance(w, MarlinWeight):
        raise FormatError(
            f"{op}: w must be a MarlinWeight, found {type(w).__name__}; call fp4jax.marlin.repack"
        )
    if jnp.dtype(x.dtype).name not in FLOAT_DTYPES:
        raise FormatError(f"{op}: x is {x.dtype} {x.shape}; it must be one of {FLOAT_DTYPES}")
    if not x.shape or x.shape[-1] != w.k:
        raise FormatError(
            f"{op}: x {x.shape} does not fit the weight {w.shape}: x's last axis must be K = {w.k}"
        )
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out.name not in FLOAT_DTYPES:
        raise FormatError(f"{op}: out_dtype is {out.name}; it must be one of {FLOAT_DTYPES}")
    return out


def make_spec(
    op: str,
    x: Float[Array, "*m k"] | jax.ShapeDtypeStruct,
    w: MarlinWeight,
    out_dtype: jnp.dtype,
    m: int,
) -> MatmulSpec:
    """The spec of a checked call, on the platform that :func:`platform_of` finds."""
    platform, kind = platform_of(x)
    return MatmulSpec(
        op=op,
        m=m,
        n=w.n,
        k=w.k,
        x_dtype=jnp.dtype(x.dtype).name,
        out_dtype=out_dtype.name,
        shards=w.shards,
        layout=w.layout,
        experts=w.stack[0] if w.stack else None,
        platform=platform,
        device_kind=kind,
    )
