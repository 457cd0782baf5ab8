"""ES004, from the text alone: arrays that a compiled function captures.

:mod:`fp4jax.check_engine_state.captured_consts` asks the same of a traced function.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from fp4jax.check_engine_state.project import (
    PLAIN_ATTRIBUTES,
    PLAIN_CALLS,
    Project,
    kind_of_name,
    makes_array,
    makes_jax_array,
)
from fp4jax.check_engine_state.source import FUNCTIONS, Function, Hits, Source, words

_JITS = words(
    "jax.jit jax.pmap jax.pjit jax.api.jit jax.experimental.pjit.pjit flax.linen.jit "
    "flax.nnx.jit flax.nnx.pmap equinox.filter_jit equinox.filter_pmap haiku.jit"
)
_PASS_THROUGH = words(
    "jax.vmap jax.grad jax.value_and_grad jax.checkpoint jax.remat jax.shard_map jax.jvp jax.vjp "
    "jax.linearize jax.experimental.shard_map.shard_map"
)


def captures(project: Project, source: Source) -> Hits:
    """Arrays that compiled functions of this file hold, and arrays made by importing it."""
    jitted = dict(_jitted(source))  # function: the place that compiles it
    compiled = _reached(source, jitted)
    for function, place in jitted.items():
        if not any(outer in compiled for outer in source.enclosing_functions(function)):
            yield from _free_variables(project, source, function, place)
    yield from _bound_arguments(project, source)
    yield from _methods(project, source, jitted)
    yield from _import_time(project, source, compiled)


def is_jit(source: Source, expr: ast.expr) -> bool:
    """``jax.jit``, ``jax.jit(static_argnums=0)`` or ``partial(jax.jit, …)``, as a decorator."""
    expr = source.looked_through(expr)
    if isinstance(expr, ast.Call):
        if source.qualify(expr.func) == "functools.partial" and expr.args:
            return is_jit(source, expr.args[0])
        return is_jit(source, expr.func) and not expr.args
    return source.qualify(expr) in _JITS


def _jit_calls(source: Source) -> Iterator[tuple[ast.Call, ast.expr]]:
    """``jit(f, …)`` calls with the function they compile."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and node.args and is_jit(source, node.func):
            target = node.args[0]
            while (
                isinstance(target, ast.Call)
                and target.args
                and source.qualify(target.func) in _PASS_THROUGH
            ):
                target = target.args[0]
            yield node, target


def _definition(source: Source, expr: ast.expr) -> Function | None:
    if isinstance(expr, ast.Lambda):
        return expr
    if isinstance(expr, ast.Call) and source.qualify(expr.func) == "functools.partial":
        return _definition(source, expr.args[0]) if expr.args else None
    for binding in source.bound_to(expr) if isinstance(expr, ast.Name) else ():
        if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return binding.node
        if isinstance(binding.value, ast.Lambda):
            return binding.value
    return None


def _jitted(source: Source) -> Iterator[tuple[Function, ast.AST]]:
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            is_jit(source, decorator) for decorator in node.decorator_list
        ):
            yield node, node
    for call, target in _jit_calls(source):
        function = _definition(source, target)
        if function is not None:
            yield function, call


def _reached(source: Source, jitted: dict[Function, ast.AST]) -> set[ast.AST]:
    """Functions that run under a trace: compiled ones, nested ones, and those they name."""
    found: set[ast.AST] = set()
    waiting: list[ast.AST] = list(jitted)
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.add(function)
        for node in ast.walk(function):
            if node is not function and isinstance(node, FUNCTIONS):
                waiting.append(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                waiting += [
                    b.node
                    for b in source.bound_to(node)
                    if isinstance(b.node, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
    return found


def _free_variables(project: Project, source: Source, function: Function, place: ast.AST) -> Hits:
    outer = set(source.enclosing_functions(function)) - {function}
    caught: list[str] = []
    for node in ast.walk(function):
        if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
            continue
        if node not in source.scopes or source.home(node) not in outer:
            continue
        text = _array_use(project, source, node)
        if text is not None and text not in caught:
            caught.append(text)
    if caught:
        name = getattr(function, "name", "lambda")
        yield place, f"compiled function `{name}` captures {_listed(caught)}"


def _array_use(project: Project, source: Source, name: ast.Name) -> str | None:
    """The text of a use that reads an array out of a free variable; None if it does not."""
    parent, kind = source.parents[name], project.kind(source, name)
    if isinstance(parent, ast.Attribute) and parent.value is name:
        if kind == "array":
            return None if parent.attr in PLAIN_ATTRIBUTES else name.id
        return ast.unparse(parent) if kind_of_name(parent.attr) == "array" else None
    if kind == "array":
        return name.id
    called = isinstance(parent, ast.Call) and parent.func is name
    return f"the arrays of {name.id}" if kind == "module" and called else None


def _bound_arguments(project: Project, source: Source) -> Hits:
    """``jit(partial(f, params))``: what partial binds is captured."""
    for call, target in _jit_calls(source):
        if any(True for outer in source.enclosing_functions(call) if _is_traced(source, outer)):
            continue
        if isinstance(target, ast.Call) and source.qualify(target.func) == "functools.partial":
            values = [*target.args[1:], *(k.value for k in target.keywords)]
            caught = [ast.unparse(v) for v in values if project.kind(source, v) == "array"]
            if caught:
                yield call, f"compiled partial binds {_listed(caught)}"


def _is_traced(source: Source, function: Function) -> bool:
    return not isinstance(function, ast.Lambda) and any(
        is_jit(source, decorator) for decorator in function.decorator_list
    )


def _methods(project: Project, source: Source, jitted: dict[Function, ast.AST]) -> Hits:
    """Bound methods, and methods whose ``self`` is static: the arrays of self are captured."""
    for call, target in _jit_calls(source):
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
            continue
        for outer in source.enclosing_functions(call):
            owner = source.scopes[outer]
            if isinstance(owner, ast.ClassDef):
                bound = source.bindings[owner].get(target.attr, ())
                for binding in bound:
                    if isinstance(binding.node, ast.FunctionDef):
                        yield from _self_arrays(binding.node, call)
                break
    for function in jitted:
        if isinstance(function, ast.FunctionDef) and _self_is_static(source, function):
            yield from _self_arrays(function, function)


def _self_is_static(source: Source, function: ast.FunctionDef) -> bool:
    if not isinstance(source.scopes[function], ast.ClassDef) or not function.args.args:
        return False
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            text = ast.unparse(keyword.value)
            if keyword.arg == "static_argnums" and text.strip("()[], ").split(",")[0] == "0":
                return True
            if keyword.arg == "static_argnames" and f"'{function.args.args[0].arg}'" in text:
                return True
    return False


def _self_arrays(method: ast.FunctionDef, place: ast.AST) -> Hits:
    if not method.args.args:
        return
    me = method.args.args[0].arg
    caught = sorted(
        {
            ast.unparse(node)
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == me
            and kind_of_name(node.attr) == "array"
        }
    )
    if caught:
        yield place, f"compiled method `{method.name}` captures {_listed(caught)}"


def _import_time(project: Project, source: Source, compiled: set[ast.AST]) -> Hits:
    for scope in (source.tree, *(n for n in source.nodes if isinstance(n, ast.ClassDef))):
        for name, bindings in source.bindings[scope].items():
            for binding in bindings:
                value = binding.value
                if value is None or binding.kind != "assign":
                    continue
                if not source.runs_at_import(binding.node) or source.in_main_block(binding.node):
                    continue
                made = _array_call(source, value)
                if made is None:
                    continue
                if makes_jax_array(source, made) and source.is_package_file:
                    yield (
                        binding.node,
                        f"`{name}` is a device array made by importing the file; every function "
                        "compiled over it captures it",
                    )
                    continue
                use = _compiled_use(project, source, name, compiled) if scope is source.tree else 0
                if use:
                    yield binding.node, f"`{name}` is an array that compiled code captures {use}"
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                made = None if default is None else _array_call(source, default)
                if made is not None and default is not None:
                    name = getattr(node, "name", "<lambda>")
                    yield default, f"the array default of `{name}` is made once and captured"


def _array_call(source: Source, value: ast.expr) -> ast.Call | None:
    """The call that makes the array, if any; methods and arithmetic are looked through."""
    if isinstance(value, ast.Call):
        if makes_array(source, value):
            return value
        func = value.func
        if isinstance(func, ast.Attribute) and func.attr not in PLAIN_CALLS:
            return _array_call(source, func.value)
        return None
    if isinstance(value, ast.BinOp):
        return _array_call(source, value.left) or _array_call(source, value.right)
    if isinstance(value, ast.UnaryOp):
        return _array_call(source, value.operand)
    if isinstance(value, ast.Subscript):
        return _array_call(source, value.value)
    parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
    parts = [v for v in value.values if v] if isinstance(value, ast.Dict) else parts
    return next(filter(None, (_array_call(source, part) for part in parts)), None)


def _compiled_use(
    project: Project, source: Source, name: str, compiled: set[ast.AST]
) -> str | None:
    for node in source.nodes:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            under = any(outer in compiled for outer in source.enclosing_functions(node))
            parent = source.parents[node]
            plain = isinstance(parent, ast.Attribute) and parent.attr in PLAIN_ATTRIBUTES
            if under and not plain and source.home(node) is source.tree:
                return f"at line {node.lineno}"
    for other in project.sources:
        if other is source or name not in other.text:
            continue
        reached = _reached(other, dict(_jitted(other)))
        for node in other.nodes:
            if not isinstance(node, ast.Name | ast.Attribute):
                continue
            dotted = other.qualify(node)
            if dotted is None or dotted.rpartition(".")[2] != name:
                continue
            found = project.resolve(dotted)
            if found is None or found[0] is not source or found[1] != name:
                continue
            if any(outer in reached for outer in other.enclosing_functions(node)):
                return f"at {other.path}:{node.lineno}"
    return None


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
