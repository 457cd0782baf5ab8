"""ES001, the writes: state that is changed through somebody else's name."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.containers import MUTATORS, container_kind
from fp4jax.check_engine_state.instances import CONSTRUCTION, instance_kind
from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import Binding, Function, Hits, Source, words

_ARRAY_MUTATORS = words("fill sort put itemset resize partition setfield")


def hidden_writes(project: Project, source: Source, node: ast.AST) -> Hits:
    """What a node writes to behind its owner's back, if it does."""
    if isinstance(node, ast.Global):
        yield from _global(source, node)
    elif isinstance(node, ast.Attribute | ast.Subscript):
        yield from _store(project, source, node)
    elif isinstance(node, ast.Call):
        yield from _call(project, source, node)


def _global(source: Source, node: ast.Global) -> Hits:
    function = next(source.enclosing_functions(node), None) or source.scopes[node]
    for name in node.names:
        bound = source.bindings[source.tree].get(name, [])
        if any(function in source.ancestors(b.node) for b in bound):
            yield node, f"`global {name}` rebinds module state from inside a function"
            return


def _store(project: Project, source: Source, node: ast.Attribute | ast.Subscript) -> Hits:
    if not isinstance(node.ctx, ast.Store | ast.Del):
        return
    if _hidden_namespace(source, node.value):
        if not _constructing(source, node):
            yield node, f"`{ast.unparse(node)}` writes to a namespace behind its owner's back"
        return
    if isinstance(node, ast.Attribute) and _own_class(source, node.value):
        yield node, f"`{ast.unparse(node)}` changes the class, and so every instance"
        return
    base: ast.expr = node
    while isinstance(base, ast.Attribute | ast.Subscript):
        base = base.value
    if isinstance(base, ast.Name):
        yield from _store_on_name(project, source, node, base)


def _store_on_name(
    project: Project, source: Source, node: ast.Attribute | ast.Subscript, base: ast.Name
) -> Hits:
    text, home = ast.unparse(node), source.home(base)
    bound = source.bound_to(base)
    binding = bound[0] if bound else None
    if binding is None or home is None:
        return
    at_import = source.runs_at_import(node)
    if binding.kind in ("def", "class") and isinstance(node, ast.Attribute) and node.value is base:
        if node.attr.startswith("__") and node.attr.endswith("__"):
            return
        parent = source.parents[node]
        kind = container_kind(source, getattr(parent, "value", None))
        if kind is not None:
            yield node, f"attribute `{text}` of a {_owner(binding)} is a mutable {kind}"
        elif not at_import and home is source.tree:
            yield node, f"`{text}` keeps state on a {_owner(binding)}"
    elif binding.kind == "assign" and home is source.tree and not at_import:
        if container_kind(source, binding.value) or instance_kind(project, source, binding.value):
            return  # reported where it is made
        if source.in_main_block(binding.node):
            return
        yield node, f"`{text}` changes the module-level `{base.id}` from inside a function"
    elif binding.kind == "import" and not at_import and isinstance(node, ast.Attribute):
        module = source.qualify(node.value)
        if module in project.modules:
            yield node, f"`{text}` rebinds a name of the module {module}"


def _owner(binding: Binding) -> str:
    return "function" if binding.kind == "def" else "class"


def _hidden_namespace(source: Source, owner: ast.expr) -> bool:
    """``globals()``, ``vars(x)``, ``x.__dict__`` or ``sys.modules[...]``."""
    if isinstance(owner, ast.Call):
        return source.qualify(owner.func) in ("builtins.globals", "builtins.vars")
    if isinstance(owner, ast.Attribute):
        return owner.attr == "__dict__"
    return isinstance(owner, ast.Subscript) and source.qualify(owner.value) == "sys.modules"


def _own_class(source: Source, owner: ast.expr) -> bool:
    """``cls``, ``type(self)`` or ``self.__class__`` in a method that runs after set-up."""
    function = next(source.enclosing_functions(owner), None)
    if function is None or getattr(function, "name", "") in ("__init_subclass__", "__new__"):
        return False
    if isinstance(owner, ast.Call):
        return source.qualify(owner.func) == "builtins.type" and len(owner.args) == 1
    if isinstance(owner, ast.Attribute):
        return owner.attr == "__class__"
    return (
        isinstance(owner, ast.Name)
        and owner.id == "cls"
        and any(source.qualify(d) == "builtins.classmethod" for d in _decorators(function))
    )


def _decorators(function: Function) -> list[ast.expr]:
    return [] if isinstance(function, ast.Lambda) else function.decorator_list


def _constructing(source: Source, node: ast.AST) -> bool:
    return any(getattr(f, "name", "") in CONSTRUCTION for f in source.enclosing_functions(node))


def _call(project: Project, source: Source, node: ast.Call) -> Hits:
    name = source.qualify(node.func) or ""
    first = node.args[0] if node.args else None
    if name == "builtins.object.__setattr__":
        if not _constructing(source, node):
            yield node, "`object.__setattr__` changes a frozen object after it was made"
    elif name == "builtins.setattr" and first is not None:
        found = source.bound_to(first) if isinstance(first, ast.Name) else ()
        shared = bool(found) and found[0].kind in ("def", "class")
        if (shared and not source.runs_at_import(node)) or _hidden_namespace(source, first):
            yield node, f"`{ast.unparse(node)}` keeps state on a function, class or module"
    elif isinstance(node.func, ast.Attribute):
        yield from _method(project, source, node, node.func)


def _method(project: Project, source: Source, node: ast.Call, func: ast.Attribute) -> Hits:
    owner = func.value
    if func.attr in MUTATORS and _hidden_namespace(source, owner):
        if not _constructing(source, node):
            yield node, f"`{ast.unparse(func)}` writes to a namespace behind its owner's back"
    elif isinstance(owner, ast.Name) and func.attr in ("setdefault", *_ARRAY_MUTATORS):
        # A module-level value of unknown type that behaves like a container.
        bound = source.bound_to(owner)
        if (
            bound
            and bound[0].kind == "assign"
            and source.home(owner) is source.tree
            and not source.runs_at_import(node)
            and container_kind(source, bound[0].value) is None
            and instance_kind(project, source, bound[0].value) is None
        ):
            yield node, f"`{ast.unparse(func)}` changes the module-level `{owner.id}`"
