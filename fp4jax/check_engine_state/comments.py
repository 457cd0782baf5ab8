"""Allow comments: ``# fp4jax: allow ES001 (reason)``, and ``allow-file`` for a whole file."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator

from fp4jax.check_engine_state.findings import RULE_IDS
from fp4jax.check_engine_state.source import Source

_COMMENT = re.compile(r"(?:^|\s)#\s*fp4jax:\s*(?P<body>.*)")
_ALLOW = re.compile(
    r"allow(?P<file>-file)?\s+(?P<ids>[\w ,]+?)\s*\((?P<reason>[^#]*[^#\s][^#]*)\)(\s*#.*)?"
)


@dataclasses.dataclass(frozen=True)
class Allow:
    """One allow comment: the rules it names and the lines that it covers."""

    rules: tuple[str, ...]
    line: int
    column: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class BadAllow:
    """An allow comment that cannot be used."""

    line: int
    column: int
    problem: str


def allow_comments(source: Source) -> Iterator[Allow | BadAllow]:
    """All allow comments of a file.

    A comment after code covers that line; one on a line of its own covers the next line of code.
    """
    if "fp4jax:" not in source.text:
        return
    lines = source.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
        if match is None:
            continue
        line, column = token.start[0], token.start[1] + 1
        parsed = _ALLOW.fullmatch(match["body"].rstrip())
        if parsed is None:
            yield BadAllow(line, column, "the comment does not read `allow ES00x (reason)`")
            continue
        rules = tuple(re.split(r"[ ,]+", parsed["ids"].strip()))
        unknown = [rule for rule in rules if rule not in RULE_IDS]
        if unknown:
            yield BadAllow(line, column, f"there is no rule {', '.join(unknown)}")
            continue
        if parsed["file"]:
            yield Allow(rules, line, column, 1, len(lines) + 1)
            continue
        last = line
        if not lines[line - 1][: column - 1].strip():
            while last < len(lines) and (
                not lines[last].strip() or lines[last].lstrip().startswith("#")
            ):
                last += 1
            last += 1
        yield Allow(rules, line, column, line, last)


def span(source: Source, node: ast.AST) -> tuple[int, int]:
    """Lines on which an allow comment reaches a finding at ``node``.

    The statement that holds it, whole if it is a simple one; of a compound one (a function, a
    class, an ``if``) its header, with decorators.
    """
    statement = node
    for up in source.ancestors(node):
        if isinstance(statement, ast.stmt | ast.Module):
            break
        statement = up
    first = getattr(statement, "lineno", 1)
    last = getattr(statement, "end_lineno", None) or first
    body = getattr(statement, "body", ())
    if body:
        last = max(first, body[0].lineno - 1)
    decorators = getattr(statement, "decorator_list", ())
    return min([first, *(d.lineno for d in decorators)]), last
