"""ES002: addresses, hashes and weak references that stand in for identity."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import Hits, Source, words

_ADDRESS_ATTRIBUTES = words(
    "data_ptr unsafe_buffer_pointer __array_interface__ __cuda_array_interface__ "
    "__array_struct__ _cdata"
)
_WEAK_TABLES = frozenset(
    "weakref." + name for name in ("WeakKeyDictionary", "WeakValueDictionary", "WeakSet")
)
_WEAK_REFERENCES = frozenset(
    "weakref." + name for name in ("ref", "ReferenceType", "proxy", "WeakMethod")
)
_KEY_METHODS = words("get setdefault pop add discard remove")


def identity_keys(project: Project, source: Source) -> Hits:
    """Places that take the identity of an object for that of its content."""
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            yield from _attribute(project, source, node)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = source.qualify(node)
            if name == "builtins.id":
                yield node, f"`{_call_text(source, node)}` is an address, not an identity"
            elif name == "builtins.hash":
                yield from _hash(project, source, node)
            elif name == "builtins.object.__hash__":
                yield node, "`object.__hash__` is made from the object's address"
            elif name in _WEAK_TABLES and not _in_annotation(source, node):
                yield node, f"`{name}` is a table keyed or emptied by object identity"
        if isinstance(node, ast.Call):
            name = source.qualify(node.func)
            if name in _WEAK_REFERENCES:
                yield from _weak_reference(source, node)
            elif name == "builtins.getattr" and _names_address(node):
                yield node, f"`{ast.unparse(node)}` is an address, not an identity"


def _names_address(call: ast.Call) -> bool:
    wanted = call.args[1] if len(call.args) > 1 else None
    return isinstance(wanted, ast.Constant) and wanted.value in _ADDRESS_ATTRIBUTES


def _call_text(source: Source, name: ast.Name | ast.Attribute) -> str:
    parent = source.parents[name]
    called = isinstance(parent, ast.Call) and parent.func is name
    return ast.unparse(parent if called else name)


def _hash(project: Project, source: Source, name: ast.Name | ast.Attribute) -> Hits:
    parent = source.parents[name]
    if not (isinstance(parent, ast.Call) and parent.func is name and len(parent.args) == 1):
        return
    kind = project.kind(source, parent.args[0])
    if kind in ("array", "module"):
        yield name, f"`{ast.unparse(parent)}` takes the hash of what looks like {_a(kind)}"


def _a(kind: str) -> str:
    return "an array" if kind == "array" else f"a {kind}"


def _attribute(project: Project, source: Source, node: ast.Attribute) -> Hits:
    up = source.parents[node]
    if node.attr in _ADDRESS_ATTRIBUTES:
        yield node, f"`{ast.unparse(node)}` is an address, not an identity"
        return
    if node.attr == "ctypes" and isinstance(up, ast.Attribute) and up.attr in ("data", "data_as"):
        yield node, f"`{ast.unparse(up)}` is an address, not an identity"
    called = isinstance(up, ast.Call) and up.func is node
    if node.attr == "__hash__" and called:
        kind = project.kind(source, node.value)
        if kind in ("array", "module"):
            yield node, f"`{ast.unparse(up)}` takes the hash of what looks like {_a(kind)}"


def _in_annotation(source: Source, node: ast.AST) -> bool:
    child: ast.AST = node
    for up in source.ancestors(node):
        if isinstance(up, ast.AnnAssign | ast.arg):
            return up.annotation is child
        if isinstance(up, ast.FunctionDef | ast.AsyncFunctionDef):
            return up.returns is child
        if isinstance(up, ast.stmt):
            return False
        child = up
    return False


def _weak_reference(source: Source, call: ast.Call) -> Hits:
    """A weak reference is refused where it, or the variable that holds it, is used as a key."""
    message = f"`{ast.unparse(call)}` is used as a key: it outlives what it refers to"
    if _is_key(source, call):
        yield call, message
        return
    parent = source.parents[call]
    if isinstance(parent, ast.NamedExpr):
        targets: list[ast.expr] = [parent.target]
    else:
        targets = parent.targets if isinstance(parent, ast.Assign) else []
    held = {target.id for target in targets if isinstance(target, ast.Name)}
    scope = source.scopes[call]
    for node in source.nodes:
        if not (isinstance(node, ast.Name) and node.id in held and source.home(node) is scope):
            continue
        if isinstance(node.ctx, ast.Load) and _is_key(source, node):
            yield call, message
            return


def _is_key(source: Source, node: ast.expr) -> bool:
    child: ast.AST = node
    for up in source.ancestors(node):
        if isinstance(up, ast.Subscript):
            return up.slice is child
        if isinstance(up, ast.Dict):
            return any(key is child for key in up.keys)
        if isinstance(up, ast.Set | ast.SetComp):
            return True
        if isinstance(up, ast.DictComp):
            return up.key is child
        if isinstance(up, ast.Compare):
            return any(isinstance(op, ast.In | ast.NotIn) for op in up.ops) and up.left is child
        if isinstance(up, ast.Call):
            func = up.func
            return (
                isinstance(func, ast.Attribute) and func.attr in _KEY_METHODS and child in up.args
            )
        if not isinstance(up, ast.Tuple | ast.NamedExpr):
            return False
        child = up
    return False
