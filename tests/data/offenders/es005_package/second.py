"""Each marked line is refused, and no other line is."""

from json import dumps

from es005_package.first import repack

BLOCK_SIZE: int = 16  # expect: ES005


class Weight:  # expect: ES005
    pass


async def repack(weight):  # noqa: F811  # expect: ES005
    return weight


def dumps(value):  # noqa: F811  # expect: ES005
    return str(value)
