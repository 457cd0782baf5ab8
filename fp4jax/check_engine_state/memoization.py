"""ES003: memoized functions of arrays or modules."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.project import (
    Project,
    kind_of_name,
    makes_array,
    own_nodes,
    parameters,
)
from fp4jax.check_engine_state.source import Function, Hits, Source, words

_MEMOS = words(
    """
    functools.lru_cache functools.cache functools.cached_property cachetools.cached
    cachetools.cachedmethod cachetools.func.lru_cache cachetools.func.ttl_cache
    methodtools.lru_cache async_lru.alru_cache joblib.Memory.cache
    django.utils.functional.cached_property
    """
)
_REFUSED_MEMOS = frozenset(("weakref_lru_cache", "multi_weakref_lru_cache"))


def memoization(project: Project, source: Source) -> Hits:
    """Memoizing decorators and calls over functions that take or return arrays or modules."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                memo = _memo(source, decorator)
                if memo is None:
                    continue
                why = _why(project, source, node, memo)
                if why is not None:
                    yield decorator, f"`{memo}` remembers results of `{node.name}`, which {why}"
        elif isinstance(node, ast.Call):
            yield from _call(project, source, node)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = source.qualify(node) or ""
            if _always_refused(name) and not isinstance(source.parents[node], ast.Attribute):
                yield node, f"`{name}` keys on array or module identity by design"


def _always_refused(name: str) -> bool:
    if name in ("jax.util.cache", "jax._src.util.cache"):
        return True
    return name.startswith("jax.") and name.rpartition(".")[2] in _REFUSED_MEMOS


def _memo(source: Source, expr: ast.expr) -> str | None:
    """The memoizer behind ``cache``, ``lru_cache(maxsize=None)`` or ``partial(lru_cache, 8)``."""
    expr = source.looked_through(expr)
    if isinstance(expr, ast.Call):
        if source.qualify(expr.func) == "functools.partial" and expr.args:
            return _memo(source, expr.args[0])
        return _memo(source, expr.func)
    name = source.qualify(expr)
    return name if name in _MEMOS else None


def _call(project: Project, source: Source, node: ast.Call) -> Hits:
    """``lru_cache(f)`` and ``lru_cache(None)(f)``: not as a decorator."""
    parent = source.parents[node]
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and node in parent.decorator_list:
        return
    memo = _memo(source, node.func)
    if memo is None or len(node.args) != 1:
        return
    target = node.args[0]
    found: tuple[Source, Function] | None = None
    if isinstance(target, ast.Lambda):
        found = source, target
    elif isinstance(target, ast.Name | ast.Attribute):
        local = source.bound_to(target) if isinstance(target, ast.Name) else ()
        for binding in local:
            if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
                found = source, binding.node
        found = found or project.function(source.qualify(target))
    if found is not None:
        why = _why(project, *found, memo)
        if why is not None:
            yield node, f"`{memo}` remembers results of `{ast.unparse(target)}`, which {why}"


def _why(project: Project, source: Source, function: Function, memo: str) -> str | None:
    """What makes a function one of arrays or modules; None if nothing does."""
    owner = source.scopes[function]
    in_class = owner if isinstance(owner, ast.ClassDef) else None
    every = list(parameters(function))
    for at, arg in enumerate(every):
        if at == 0 and in_class is not None and arg.arg in ("self", "cls"):
            if project.classes.get(in_class.name):
                kind = "module" if project.classes[in_class.name] == "module" else "pytree"
                return f"belongs to the {kind} `{in_class.name}`"
            continue
        said = project.annotated(arg.annotation)
        if said in ("array", "module"):
            return f"takes the {said} `{arg.arg}`"
        if said is None and kind_of_name(arg.arg) is not None:
            return f"takes `{arg.arg}`, by its name an array or module (annotate it if it is not)"
    if isinstance(function, ast.Lambda):
        return "makes arrays" if _made(source, function) else None
    said = project.annotated(function.returns)
    if said in ("array", "module"):
        return f"returns an {said}".replace("an module", "a module")
    made = _made(source, function)
    if made is not None and said != "plain":  # a plain result keeps no array
        return f"calls `{ast.unparse(made.func)}` (line {made.lineno})"
    if memo.endswith("cached_property") and in_class is not None:
        for node in own_nodes(function):
            if isinstance(node, ast.Attribute) and kind_of_name(node.attr) == "array":
                return f"reads `{ast.unparse(node)}`"
    return None


def _made(source: Source, function: Function) -> ast.Call | None:
    calls = (n for n in own_nodes(function) if isinstance(n, ast.Call) and makes_array(source, n))
    return min(calls, key=lambda call: call.lineno, default=None)
