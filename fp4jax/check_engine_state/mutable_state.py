"""ES001: state that outlives a call without being in anybody's parameter tree."""

from __future__ import annotations

import ast

from fp4jax.check_engine_state.containers import (
    CONTAINER_BASES,
    container_kind,
    literal_table,
    uses,
    why_not_a_constant,
)
from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import FUNCTIONS, Binding, Function, Hits, Source, words

_CONSTRUCTION = words(
    "__init__ __new__ __post_init__ __setstate__ __setattr__ __delattr__ __init_subclass__ "
    "__set_name__ __enter__ __exit__ __copy__ __deepcopy__ tree_unflatten setup"
)
_CLASS_DECLARATIONS = frozenset(("_fields_", "_ignore_", "_anonymous_"))
_MUTATORS = words(
    "append appendleft extend extendleft add update setdefault insert pop popleft popitem clear "
    "remove discard"
)
_ARRAY_MUTATORS = words("fill sort put itemset resize partition setfield")


def mutable_state(project: Project, source: Source) -> Hits:
    """Places where a file keeps mutable state outside of calls."""
    yield from _module_names(project, source)
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            yield from _class_names(source, node)
        elif isinstance(node, FUNCTIONS):
            yield from _defaults(source, node)
            yield from _closure_cache(source, node)
        elif isinstance(node, ast.Global):
            yield from _global(source, node)
        elif isinstance(node, ast.Attribute | ast.Subscript):
            yield from _store(project, source, node)
        elif isinstance(node, ast.Call):
            yield from _call(project, source, node)


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
                kind = _instance_kind(project, source, value)
                if kind is not None:
                    yield node, f"module-level `{name}` is {kind}"
                continue
            why = why_not_a_constant(project, source, name, value)
            if why is None:
                continue
            if not why and literal_table(value) is None and "holds" not in kind:
                written = _first_write(project, source, name)
                why = f"is written to at {written}" if written else "can be written to by anyone"
            problem = f"module-level `{name}` is a mutable {kind}"
            yield node, f"{problem} that {why}" if why else problem


def _first_write(project: Project, source: Source, name: str) -> str | None:
    for where, use in uses(project, source, name):
        up = where.parents[use]
        stores = isinstance(up, ast.Subscript) and isinstance(up.ctx, ast.Store | ast.Del)
        if stores or (isinstance(up, ast.Attribute) and up.attr in _MUTATORS):
            return f"line {use.lineno}" if where is source else f"{where.path}:{use.lineno}"
    return None


def _instance_kind(project: Project, source: Source, value: ast.expr) -> str | None:
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
        if isinstance(method, ast.FunctionDef) and method.name not in _CONSTRUCTION:
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
        and node.func.attr in _MUTATORS
        and isinstance(node.func.value, ast.Attribute)
        and _root(node.func.value) == me
    )


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
    returned = {
        n.value.id
        for n in ast.walk(node)
        if isinstance(n, ast.Return) and isinstance(n.value, ast.Name)
    }
    for name, bindings in source.bindings[node].items():
        made = next((b for b in bindings if container_kind(source, b.value)), None)
        if made is None or made.kind != "assign":
            continue
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
        if container_kind(source, binding.value) or _instance_kind_of(project, source, binding):
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


def _instance_kind_of(project: Project, source: Source, binding: Binding) -> str | None:
    value = binding.value
    return None if value is None else _instance_kind(project, source, value)


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
    return any(getattr(f, "name", "") in _CONSTRUCTION for f in source.enclosing_functions(node))


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
    if func.attr in _MUTATORS and _hidden_namespace(source, owner):
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
            and _instance_kind_of(project, source, bound[0]) is None
        ):
            yield node, f"`{ast.unparse(func)}` changes the module-level `{owner.id}`"


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
