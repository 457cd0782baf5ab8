"""The definitions that the other files repeat."""

BLOCK_SIZE = 16


class Weight:
    pass


def repack(weight):
    return weight


def twice():
    return 1


def twice():  # noqa: F811  # expect: ES005
    return 2
