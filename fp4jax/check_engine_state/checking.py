"""Runs the rules over files and settles what allow comments cover."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fp4jax.check_engine_state.captures import captures
from fp4jax.check_engine_state.comments import Allow, BadAllow, allow_comments, span
from fp4jax.check_engine_state.definitions import (
    Definition,
    duplicate_definitions,
    public_definitions,
)
from fp4jax.check_engine_state.files import CheckConfig, python_files, read_check_config
from fp4jax.check_engine_state.findings import RULE_IDS, Finding, with_remedy
from fp4jax.check_engine_state.identity_keys import identity_keys
from fp4jax.check_engine_state.memoization import memoization
from fp4jax.check_engine_state.mutable_state import mutable_state
from fp4jax.check_engine_state.project import Project
from fp4jax.check_engine_state.source import Source, parse_source
from fp4jax.errors import Fp4JaxError

_FILE_RULES = (
    ("ES001", mutable_state),
    ("ES002", identity_keys),
    ("ES003", memoization),
    ("ES004", captures),
)


def check_paths(
    paths: Iterable[str | os.PathLike[str]],
    *,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    exclude: Sequence[str] = (),
    config: CheckConfig | None = None,
) -> list[Finding]:
    """Checks files and folders; imports and runs nothing of what it checks.

    Args:
      paths: files, checked whatever ``exclude`` says, and folders, walked for ``*.py``.
      select: rules to run ("ES001", …); all if empty.
      ignore: rules not to run.
      exclude: patterns of files and folders to leave out, beside the configuration's.
      config: by default the table ``[tool.fp4jax.check_engine_state]`` of the ``pyproject.toml``
        nearest to the first path.

    Returns:
      What was refused, in order of file and line.

    Raises:
      Fp4JaxError: a path does not exist, a rule is unknown, or the configuration is malformed.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise Fp4JaxError("no paths to check were given")
    if config is None:
        config = read_check_config(given[0])
    rules = _rules(select or config.select, (*ignore, *config.ignore))
    findings: list[Finding] = []
    sources: list[Source] = []
    for path, shown in python_files(given, (*config.exclude, *exclude), config.root):
        try:
            sources.append(parse_source(path, shown))
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            findings.append(_unreadable(shown, error))
    project = Project.of(tuple(sources))
    hits = {source.path: list(_file_hits(project, source, rules)) for source in sources}
    comments = {source.path: tuple(allow_comments(source)) for source in sources}
    if "ES005" in rules:
        allowed = [
            definition
            for source in sources
            for definition in public_definitions(source)
            if definition.name in config.protocol or _allows(comments[source.path], definition)
        ]
        for source, node, message in duplicate_definitions(project, allowed):
            hits[source.path].append(("ES005", node, message))
        for definition in allowed:  # so that their comments count as used
            if definition.name not in config.protocol:
                hits[definition.source.path].append(("ES005", definition.node, ""))
    for source in sources:
        findings += _settle(source, hits[source.path], comments[source.path], rules)
    wanted = sorted({finding for finding in findings if finding.rule in rules})
    return wanted


def _rules(select: Sequence[str], ignore: Sequence[str]) -> frozenset[str]:
    unknown = sorted({*select, *ignore} - set(RULE_IDS))
    if unknown:
        known = ", ".join(RULE_IDS)
        raise Fp4JaxError(f"there is no rule {', '.join(unknown)}; the rules are {known}")
    return frozenset(select or RULE_IDS) - set(ignore) | {"ES000"}


def _file_hits(
    project: Project, source: Source, rules: frozenset[str]
) -> Iterator[tuple[str, ast.AST, str]]:
    for rule, check in _FILE_RULES:
        if rule in rules:
            for node, message in check(project, source):
                yield rule, node, message


def _allows(comments: Sequence[Allow | BadAllow], definition: Definition) -> bool:
    return any(
        isinstance(comment, Allow) and _covers(comment, "ES005", definition.source, definition.node)
        for comment in comments
    )


def _covers(comment: Allow, rule: str, source: Source, node: ast.AST) -> bool:
    first, last = span(source, node)
    return rule in comment.rules and comment.first <= last and first <= comment.last


def _settle(
    source: Source,
    hits: Sequence[tuple[str, ast.AST, str]],
    comments: Sequence[Allow | BadAllow],
    rules: frozenset[str],
) -> Iterator[Finding]:
    path = source.path
    used: set[tuple[Allow, str]] = set()
    for rule, node, message in hits:
        covering = [c for c in comments if isinstance(c, Allow) and _covers(c, rule, source, node)]
        used.update((comment, rule) for comment in covering)
        if not covering:
            line = getattr(node, "lineno", 1)
            column = getattr(node, "col_offset", 0) + 1
            yield Finding(path, line, column, rule, with_remedy(rule, message))
    for comment in comments:
        if isinstance(comment, BadAllow):
            problem = with_remedy("ES006", comment.problem)
            yield Finding(path, comment.line, comment.column, "ES006", problem)
            continue
        for rule in comment.rules:
            if rule in rules and (comment, rule) not in used:
                problem = with_remedy("ES006", f"nothing here breaks {rule}")
                yield Finding(path, comment.line, comment.column, "ES006", problem)


def _unreadable(path: str, error: Exception) -> Finding:
    line, column, reason = 1, 1, str(error) or type(error).__name__
    if isinstance(error, SyntaxError):
        line, column, reason = error.lineno or 1, error.offset or 1, f"syntax error: {error.msg}"
    elif isinstance(error, RecursionError):
        reason = "is nested too deeply"
    return Finding(path, line, max(column, 1), "ES000", with_remedy("ES000", reason))
