"""``python -m fp4jax.check_engine_state PATH…``: exit status 0 clean, 1 findings, 2 usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fp4jax.check_engine_state.checking import check_paths
from fp4jax.check_engine_state.findings import RULES, format_findings
from fp4jax.errors import Fp4JaxError


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the paths and prints what is refused; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fp4jax.check_engine_state",
        description="Refuses state that could hand one engine's weights to another.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="rules:\n"
        + "\n".join(f"  {rule.id}  {rule.refuses}" for rule in RULES)
        + "\n\nA deliberate exception carries its reason: # fp4jax: allow ES00x (reason)",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="Python files, or folders to walk")
    parser.add_argument("--format", choices=("text", "json", "github"), default="text")
    parser.add_argument("--select", type=_ids, default=(), metavar="IDS", help="only these rules")
    parser.add_argument("--ignore", type=_ids, default=(), metavar="IDS", help="not these rules")
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN",
        help="leave out files and folders: a name, or a path from the pyproject.toml's folder",
    )  # fmt: skip
    options = parser.parse_args(argv)
    try:
        findings = check_paths(
            options.paths,
            select=options.select,
            ignore=options.ignore,
            exclude=options.exclude,
        )
    except Fp4JaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if findings or options.format == "json":
        print(format_findings(findings, options.format))
    if options.format == "text":
        count = len(findings)
        print(f"{count} finding{'s' * (count != 1)}" if count else "clean", file=sys.stderr)
    return 1 if findings else 0


def _ids(text: str) -> tuple[str, ...]:
    return tuple(part.strip().upper() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
