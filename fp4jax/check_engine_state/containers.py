"""Which expressions make a mutable container, and which uses of one are plainly reads."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import MappingProxyType

from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import COMPREHENSIONS, Source, words

_CONTAINER_CALLS = words(
    """
    builtins.dict builtins.list builtins.set builtins.bytearray builtins.sorted builtins.iter
    builtins.vars builtins.globals builtins.locals builtins.dict.fromkeys
    collections.defaultdict collections.OrderedDict collections.OrderedDict.fromkeys
    collections.Counter collections.deque collections.ChainMap collections.UserDict
    collections.UserList weakref.WeakKeyDictionary weakref.WeakValueDictionary weakref.WeakSet
    types.SimpleNamespace threading.local contextvars.ContextVar array.array itertools.count
    itertools.cycle queue.Queue queue.LifoQueue queue.PriorityQueue queue.SimpleQueue
    multiprocessing.Manager
    """
)
CONTAINER_BASES = _CONTAINER_CALLS | {"typing.Dict", "typing.List", "typing.Set"}
_DISPLAYS = MappingProxyType({ast.Dict: "dict", ast.List: "list", ast.Set: "set"})
MUTATORS = words(
    "append appendleft extend extendleft add update setdefault insert pop popleft popitem clear "
    "remove discard"
)
_READ_METHODS = words(
    "get items keys values index count copy union intersection difference "
    "symmetric_difference issubset issuperset isdisjoint"
)
_READING_CALLS = frozenset(
    "builtins." + name
    for name in words(
        "len tuple list dict set frozenset sorted enumerate zip max min sum any all "
        "reversed isinstance repr str bool print map filter"
    )
) | frozenset(
    (
        "types.MappingProxyType",
        "pytest.mark.parametrize",
        "hypothesis.strategies.sampled_from",
        "numpy.array",
        "numpy.asarray",
        "jax.numpy.array",
        "jax.numpy.asarray",
        "itertools.product",
        "itertools.chain",
    )
)


def container_kind(source: Source, expr: ast.expr | None) -> str | None:
    """What mutable container an expression makes ("dict", "collections.deque", …), if any."""
    if expr is None:
        return None
    if isinstance(expr, ast.Dict | ast.List | ast.Set):
        return _DISPLAYS[type(expr)]
    if isinstance(expr, COMPREHENSIONS):
        return {"GeneratorExp": "generator"}.get(
            type(expr).__name__, type(expr).__name__.removesuffix("Comp").lower() + " comprehension"
        )
    if isinstance(expr, ast.Call):
        return _call_kind(source, expr)
    if isinstance(expr, ast.IfExp):
        return container_kind(source, expr.body) or container_kind(source, expr.orelse)
    if isinstance(expr, ast.BoolOp):
        return next(filter(None, (container_kind(source, v) for v in expr.values)), None)
    if isinstance(expr, ast.BinOp):
        # `frozenset(...) | {...}` is a frozenset: the left side decides, but for `8 * [...]`.
        right = expr.right if isinstance(expr.op, ast.Mult) else None
        return container_kind(source, expr.left) or container_kind(source, right)
    if isinstance(expr, ast.NamedExpr | ast.Starred | ast.Await):
        return container_kind(source, expr.value)
    if isinstance(expr, ast.Tuple):
        held = next(filter(None, (container_kind(source, part) for part in expr.elts)), None)
        return None if held is None else f"tuple that holds a {held}"
    return None


def _call_kind(source: Source, call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Lambda):
        return container_kind(source, call.func.body)
    name = source.qualify(call.func) or ""
    if name in _CONTAINER_CALLS or name.startswith("cachetools."):
        return name.removeprefix("builtins.")
    first = call.args[0] if call.args else None
    if name in ("copy.copy", "copy.deepcopy"):
        return container_kind(source, first)
    if name in ("types.MappingProxyType", "builtins.tuple", "builtins.frozenset"):
        held = next(filter(None, (container_kind(source, v) for v in elements(first))), None)
        return None if held is None else f"{name.rpartition('.')[2]} that holds a {held}"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "copy":
        return container_kind(source, call.func.value)
    return None


def elements(expr: ast.expr | None) -> list[ast.expr]:
    """The values that a display holds (a dict's values, not its keys)."""
    if isinstance(expr, ast.Dict):
        return list(expr.values)
    if isinstance(expr, ast.List | ast.Set | ast.Tuple):
        return list(expr.elts)
    return []


def literal_table(expr: ast.expr | None) -> ast.expr | None:
    """The display behind a literal, non-empty table (``[...]``, ``{...}``, ``[...] * 3``)."""
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Mult):
        expr = expr.left
    return expr if isinstance(expr, ast.Dict | ast.List | ast.Set) and elements(expr) else None


def why_not_a_constant(project: Project, source: Source, name: str, value: ast.expr) -> str | None:
    """Why a module-level literal table cannot be taken for a constant; None if it can.

    It can when it is written out, holds no container and no array, is bound once, and when every
    use in the checked files is plainly a read: an index, a loop, ``in``, ``.get``, ``len`` and
    the like. Handing it on (a call, a return, another name) is not, because whoever receives it
    could write to it; ``tuple(...)`` or ``MappingProxyType(...)`` makes that safe.
    """
    table = literal_table(value)
    if table is None:
        return ""
    for part in elements(table):
        held = container_kind(source, part)
        if held is not None:
            return f"holds a {held}"
        if project.kind(source, part) == "array":
            return "holds an array"
    if len(source.bindings[source.tree][name]) > 1:
        return "is bound more than once"
    for where, use in uses(project, source, name):
        how = not_a_read(where, use)
        if how is not None:
            file = "" if where is source else f"{where.path}:"
            return f"{how} at {file or 'line '}{use.lineno}"
    return None


def uses(project: Project, source: Source, name: str) -> Iterator[tuple[Source, ast.expr]]:
    """Every use of a module-level name, in its own file and through imports in the others."""
    for node in source.nodes:
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Load)
            and source.home(node) is source.tree
        ):
            yield source, node
    for other in project.sources:
        if other is source or name not in other.text:
            continue
        for node in other.nodes:
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            if isinstance(node, ast.Name) and not any(
                b.kind == "import" for b in other.bound_to(node)
            ):
                continue
            dotted = other.qualify(node)
            if dotted is not None and dotted.rpartition(".")[2] == name:
                found = project.resolve(dotted)
                if found is not None and found[0] is source and found[1] == name:
                    yield other, node


def not_a_read(source: Source, use: ast.expr) -> str | None:
    """How a use could write to the container it names; None for a plain read."""
    node: ast.expr = use
    if isinstance(getattr(use, "ctx", None), ast.Store | ast.Del):
        return "is rebound"
    parent = source.parents[node]
    # T["key"].attribute[0] = … writes to what the table holds.
    while isinstance(parent, ast.Subscript | ast.Attribute) and parent.value is node:
        if isinstance(parent.ctx, ast.Store | ast.Del):
            return "is written to"
        if isinstance(parent, ast.Attribute) and node is use:
            return None if parent.attr in _READ_METHODS else f"is used through .{parent.attr}"
        node, parent = parent, source.parents[parent]
    if node is not use:
        return None  # an element, which is no container
    if isinstance(parent, ast.Call):
        name = source.qualify(parent.func) or ""
        joins = isinstance(parent.func, ast.Attribute) and parent.func.attr == "join"
        return None if joins or name in _READING_CALLS else "is handed to a call"
    if isinstance(parent, ast.keyword):
        return None if parent.arg is None else "is handed to a call"
    while isinstance(parent, ast.BoolOp):
        node, parent = parent, source.parents[parent]
    if isinstance(parent, ast.IfExp):
        return None if parent.test is node else "is handed on"
    if isinstance(node, ast.BoolOp):
        tests = (ast.If, ast.While, ast.Assert, ast.UnaryOp)
        return None if isinstance(parent, tests) else "is handed on"
    reads = (
        ast.Subscript, ast.Compare, ast.For, ast.AsyncFor, ast.comprehension, ast.Starred,
        ast.BinOp, ast.UnaryOp, ast.FormattedValue, ast.If, ast.While, ast.Assert,
        ast.Expr, ast.Slice,
    )  # fmt: skip
    if isinstance(parent, ast.Dict):
        unpacked = any(key is None and value is node for key, value in _items(parent))
        return None if unpacked else "is handed on"
    if isinstance(parent, ast.AugAssign):
        return None  # total += TABLE reads it
    return None if isinstance(parent, reads) else "is handed on"


def _items(display: ast.Dict) -> list[tuple[ast.expr | None, ast.expr]]:
    return list(zip(display.keys, display.values, strict=True))
