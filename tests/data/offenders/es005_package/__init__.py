"""ES005 offenders: a public name has one definition in a package."""

from .first import Weight, repack

__all__ = ["Weight", "repack"]
