"""Look-alikes of ES005: all of this passes."""

from es005_lookalikes import first
from es005_lookalikes.first import repack

Weight = first.Weight

__all__ = ["Weight", "main", "repack"]


def main():
    return repack
