"""Whether an instance of a class of the checked files is mutable state."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.containers import CONTAINER_BASES, MUTATORS
from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import Source, words

CONSTRUCTION = words(
    "__init__ __new__ __post_init__ __setstate__ __setattr__ __delattr__ __init_subclass__ "
    "__set_name__ __enter__ __exit__ __copy__ __deepcopy__ tree_unflatten setup"
)
"""Methods that make an object, and so may write to it."""


def instance_kind(project: Project, source: Source, value: ast.expr | None) -> str | None:
    """Why an instance of a checked class is mutable state, if it is one."""
    if not isinstance(value, ast.Call):
        return None
    found = project.class_def(source.qualify(value.func))
    if found is None:
        return None
    why = _why_mutable(project, *found)
    return None if why is None else f"an instance of `{found[1].name}`, {why}"


def _why_mutable(
    project: Project, source: Source, node: ast.ClassDef, depth: int = 0
) -> str | None:
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        name = source.qualify(call.func if call else decorator)
        frozen = call is not None and any(
            k.arg == "frozen" and isinstance(k.value, ast.Constant) and k.value.value is True
            for k in call.keywords
        )
        if name == "dataclasses.dataclass" and not frozen:
            return "a dataclass that is not frozen"
    for base in node.bases:
        dotted = source.qualify(base)
        if dotted in CONTAINER_BASES:
            return f"a {dotted.removeprefix('builtins.')}"
        found = project.class_def(dotted) if depth < 4 else None
        if found is not None:
            why = _why_mutable(project, *found, depth + 1)
            if why is not None:
                return why
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name not in CONSTRUCTION:
            for inner in ast.walk(method):
                if _writes_to_self(inner, method):
                    line = getattr(inner, "lineno", method.lineno)
                    return f"whose method `{method.name}` changes it (line {line})"
    return None


def _writes_to_self(node: ast.AST, method: ast.FunctionDef) -> bool:
    if not method.args.args:
        return False
    me = method.args.args[0].arg
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _root(node) == me
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATORS
        and isinstance(node.func.value, ast.Attribute)
        and _root(node.func.value) == me
    )


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
