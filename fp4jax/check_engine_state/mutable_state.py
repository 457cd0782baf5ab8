"""ES001: state that outlives a call without being in anybody's parameter tree."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.containers import (
    MUTATORS,
    container_kind,
    uses,
    why_not_a_constant,
)
from fp4jax.check_engine_state.hidden_writes import hidden_writes
from fp4jax.check_engine_state.instances import instance_kind
from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import FUNCTIONS, Function, Hits, Source

_CLASS_DECLARATIONS = frozenset(("_fields_", "_ignore_", "_anonymous_"))


def mutable_state(project: Project, source: Source) -> Hits:
    """Places where a file keeps mutable state outside of calls."""
    yield from _module_names(project, source)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield from _class_names(source, node)
        elif isinstance(node, FUNCTIONS):
            yield from _defaults(source, node)
            yield from _closure_cache(source, node)
        yield from hidden_writes(project, source, node)


def _module_names(project: Project, source: Source) -> Hits:
    for name, bindings in source.bindings[source.tree].items():
        if name.startswith("__") and name.endswith("__"):
            continue
        for binding in bindings:
            value, node = binding.value, binding.node
            if binding.kind != "assign" or value is None or source.in_main_block(node):
                continue
            if not source.runs_at_import(node):
                continue  # a `global`, reported as such
            kind = container_kind(source, value)
            if kind is None:
                kind = instance_kind(project, source, value)
                if kind is not None:
                    yield node, f"module-level `{name}` is {kind}"
                continue
            why = why_not_a_constant(project, source, name, value)
            if why is None:
                continue
            if not why and "holds" not in kind:
                written = _first_write(project, source, name)
                why = f"is written to at {written}" if written else "can be written to by anyone"
            problem = f"module-level `{name}` is a mutable {kind}"
            yield node, f"{problem} that {why}" if why else problem


def _first_write(project: Project, source: Source, name: str) -> str | None:
    for where, use in uses(project, source, name):
        up = where.parents[use]
        stores = isinstance(up, ast.Subscript) and isinstance(up.ctx, ast.Store | ast.Del)
        if stores or (isinstance(up, ast.Attribute) and up.attr in MUTATORS):
            return f"line {use.lineno}" if where is source else f"{where.path}:{use.lineno}"
    return None


def _class_names(source: Source, node: ast.ClassDef) -> Hits:
    for name, bindings in source.bindings[node].items():
        if (name.startswith("__") and name.endswith("__")) or name in _CLASS_DECLARATIONS:
            continue
        for binding in bindings:
            kind = container_kind(source, binding.value) if binding.kind == "assign" else None
            if kind is not None:
                yield (
                    binding.node,
                    f"class attribute `{node.name}.{name}` is a mutable {kind} that every instance "
                    "shares",
                )


def _defaults(source: Source, node: Function) -> Hits:
    for default in (*node.args.defaults, *node.args.kw_defaults):
        kind = container_kind(source, default)
        if kind is not None and default is not None:
            name = getattr(node, "name", "<lambda>")
            yield default, f"a mutable {kind} as default of `{name}` is shared by all of its calls"


def _closure_cache(source: Source, node: Function) -> Hits:
    """A local container that a returned inner function writes to by key: a hand-made memo."""
    if isinstance(node, ast.Lambda):
        return
    containers = {
        name: made
        for name, bindings in source.bindings[node].items()
        for made in bindings
        if made.kind == "assign" and container_kind(source, made.value)
    }
    if not containers:
        return
    returned = {
        n.value.id
        for n in ast.walk(node)
        if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)
    }
    for name, made in containers.items():
        for inner in ast.walk(node):
            if not (isinstance(inner, ast.FunctionDef) and inner.name in returned):
                continue
            if inner is node:
                continue
            for use in ast.walk(inner):
                if _keyed_write(source, use, name, node):
                    yield (
                        made.node,
                        f"`{name}` lives on behind the returned function `{inner.name}`, which "
                        f"writes to it at line {getattr(use, 'lineno', inner.lineno)}: a hidden "
                        "cache",
                    )
                    return


def _keyed_write(source: Source, node: ast.AST, name: str, owner: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript | ast.Attribute):
        return False
    if isinstance(node, ast.Subscript):
        writes = isinstance(node.ctx, ast.Store)
    else:
        writes = node.attr in ("setdefault", "update")
    target = node.value
    if not (writes and isinstance(target, ast.Name) and target.id == name):
        return False
    return source.home(target) is owner
