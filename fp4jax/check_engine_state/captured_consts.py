"""ES004 on a traced function: arrays that became constants of its jaxpr instead of arguments."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from fp4jax.errors import EngineStateError

TABLE_ELEMENTS = 256
"""A host constant of at most this many elements is taken for a table written in the code."""


@dataclasses.dataclass(frozen=True)
class CapturedArray:
    """An array that a function captured.

    Attributes:
      shape: of the array.
      dtype: its name.
      place: "file:line" of the first operation that reads it, or "" where that is not known.
      primitive: that operation.
      path: the nested computations that lead to it, as "jit(step)/scan".
      on_device: a JAX array (True), or a host array (False).
    """

    shape: tuple[int, ...]
    dtype: str
    place: str
    primitive: str
    path: str
    on_device: bool

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        inside = f" in {self.path}" if self.path else ""
        kind = "device" if self.on_device else "host"
        size = ", ".join(map(str, self.shape))
        return f"{kind} array {self.dtype}[{size}], read by {self.primitive}{where}{inside}"


def captured_arrays(
    fn: Callable[..., Any], *args: Any, table_elements: int = TABLE_ELEMENTS, **kwargs: Any
) -> tuple[CapturedArray, ...]:
    """The non-scalar arrays that ``fn`` captures, found by tracing it; nothing is computed.

    Args:
      fn: plain or jitted (static arguments stay static).
      *args: as in a call; arrays may be ``jax.ShapeDtypeStruct``.
      table_elements: host (numpy) constants of at most this many elements are let through, so
        that a small table written in the code, ``jnp.asarray([0, 4, 8, 12])``, passes. JAX arrays
        are never let through. 0 refuses every non-scalar.
      **kwargs: as in a call.

    Returns:
      One entry an array and jaxpr that holds it.
    """
    import jax

    traced = fn if hasattr(fn, "trace") else jax.jit(fn)
    found: list[CapturedArray] = []
    seen: list[Any] = []
    for value, equation, path in _constants(traced.trace(*args, **kwargs).jaxpr, ""):
        if any(value is other for other in seen):
            continue
        seen.append(value)
        shape, on_device = tuple(value.shape), isinstance(value, jax.Array)
        if not shape or (not on_device and value.size <= table_elements):
            continue
        found.append(
            CapturedArray(
                shape=shape,
                dtype=str(value.dtype),
                place=_place(equation),
                primitive=str(getattr(equation, "primitive", "the result")),
                path=path,
                on_device=on_device,
            )
        )
    return tuple(found)


def check_captured(
    fn: Callable[..., Any], *args: Any, table_elements: int = TABLE_ELEMENTS, **kwargs: Any
) -> None:
    """Refuses a function that captures non-scalar arrays; see :func:`captured_arrays`.

    Raises:
      EngineStateError: it does; names each array's shape, dtype and the place that reads it.
    """
    found = captured_arrays(fn, *args, table_elements=table_elements, **kwargs)
    if found:
        name = getattr(fn, "__name__", repr(fn))
        listed = "\n".join(f"  {array}" for array in found)
        raise EngineStateError(
            f"ES004 `{name}` captures arrays as constants, so the compiled function belongs to one "
            f"engine and keeps it alive:\n{listed}\nPass them as arguments (params first)."
        )


def _constants(closed: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Constants of a closed jaxpr and all nested ones, each with the first equation to read it."""
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if hasattr(value, "shape"):
            yield value, _first_reader(closed.jaxpr, variable), path
    yield from _nested(closed.jaxpr, path)


def _nested(jaxpr: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            # JAX may also write a captured array into the equation, as a literal.
            if hasattr(variable, "val") and hasattr(variable.val, "shape"):
                yield variable.val, equation, path
        name = equation.params.get("name")
        step = f"{equation.primitive}({name})" if isinstance(name, str) else str(equation.primitive)
        inner = f"{path}/{step}" if path else step
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                if hasattr(part, "consts") and hasattr(part, "jaxpr"):
                    yield from _constants(part, inner)
                elif hasattr(part, "eqns"):
                    yield from _nested(part, inner)
    for variable in jaxpr.outvars:
        if hasattr(variable, "val") and hasattr(variable.val, "shape"):
            yield variable.val, None, path


def _first_reader(jaxpr: Any, variable: Any) -> Any:
    return next((e for e in jaxpr.eqns if any(v is variable for v in e.invars)), None)


def _place(equation: Any) -> str:
    """First frame of an equation's traceback that is neither JAX's nor Flax's nor ours."""
    import jax

    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    frames = getattr(traceback, "frames", ())
    library = os.path.dirname(os.path.dirname(jax.__file__))
    skipped = tuple(os.path.join(library, name) + os.sep for name in ("jax", "jaxlib", "flax"))
    for frame in frames:
        file = frame.file_name
        if not file.startswith(("<", *skipped)) and file != __file__:
            return f"{file}:{frame.line_num}"
    return ""
