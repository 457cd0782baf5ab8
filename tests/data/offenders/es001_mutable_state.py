"""ES001 offenders: each marked line is refused, and no other line is."""

import collections
import contextvars
import dataclasses
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections import deque as ring

import cachetools
import numpy as np

_CACHE = {}  # expect: ES001
_ANNOTATED: dict[str, object] = {}  # expect: ES001
_LIST = []  # expect: ES001
_SET = set()  # expect: ES001
_GENERIC = dict[str, int]()  # expect: ES001
_DEFAULT = defaultdict(list)  # expect: ES001
_ORDERED = OrderedDict()  # expect: ES001
_COUNTS = collections.Counter()  # expect: ES001
_RECENT = ring(maxlen=4)  # expect: ES001
_WEAK = weakref.WeakKeyDictionary()  # expect: ES001 ES002
_SQUARES = {n: n * n for n in range(4)}  # expect: ES001
_NAMES = [str(n) for n in range(4)]  # expect: ES001
_SORTED = sorted(("b", "a"))  # expect: ES001
_SPACE = types.SimpleNamespace()  # expect: ES001
_LOCAL = threading.local()  # expect: ES001
_CONTEXT = contextvars.ContextVar("engine")  # expect: ES001
_IDS = itertools.count()  # expect: ES001
_LRU = cachetools.LRUCache(maxsize=8)  # expect: ES001
_FIRST = _SECOND = []  # expect: ES001 ES001
_LEFT, _RIGHT = {}, ()  # expect: ES001
_CELL = [None]  # expect: ES001
_SLOTS = 4 * [None]  # expect: ES001
_CHOSEN = {} if sys.flags.dev_mode else None  # expect: ES001
_CALLED = (lambda: {"a": 1})()  # expect: ES001
_PAIR = ("table", {})  # expect: ES001
_PROXY = types.MappingProxyType({"held": []})  # expect: ES001
_FROM_CALL = {"seed": 1}  # expect: ES001
_HANDED_ON = {"a": 1}  # expect: ES001
_RETURNED = ["a", "b"]  # expect: ES001
_NESTED = {"a": [1, 2]}  # expect: ES001
_AS_DEFAULT = {"a": 1}  # expect: ES001
_BUFFER = np.zeros(4)

if sys.platform == "linux":
    _BRANCH = {}  # expect: ES001
try:
    _TRIED = {}  # expect: ES001
finally:
    pass


def remember(key, value):
    _CELL[0] = value
    _SLOTS[1] = value
    _FROM_CALL.update(key=value)
    _BUFFER[0] = value  # expect: ES001
    alias = _RETURNED
    save(_HANDED_ON)
    chosen = key or _AS_DEFAULT
    return alias, chosen


def save(table):
    table["saved"] = True


def default_argument(key, seen={}):  # noqa: B006  # expect: ES001
    return seen.setdefault(key, key)


def keyword_default(*, seen=collections.OrderedDict()):  # noqa: B006  # expect: ES001
    return seen


default_of_lambda = lambda key, seen=[]: seen  # noqa: E731  # expect: ES001


def counted(x):
    counted.calls += 1  # expect: ES001
    return x


counted.table = {}  # expect: ES001

_last = None


def rebinds(weight):
    global _last  # expect: ES001
    _last = weight


def through_globals(weight):
    globals()["_weight"] = weight  # expect: ES001
    sys.modules[__name__]._weight = weight  # expect: ES001
    vars(weight)["repacked"] = 1  # expect: ES001
    weight.__dict__.update(repacked=1)  # expect: ES001
    object.__setattr__(weight, "repacked", 1)  # expect: ES001
    setattr(rebinds, "weight", weight)  # noqa: B010  # expect: ES001


class Engine:
    repacked = {}  # noqa: RUF012  # expect: ES001
    seen: set[str] = set()  # noqa: RUF012  # expect: ES001
    last = None

    @classmethod
    def remember(cls, weight):
        cls.last = weight  # expect: ES001

    def keep(self, weight):
        type(self).last = weight  # expect: ES001
        self.__class__.last = weight  # expect: ES001


class Registry:
    def __init__(self):
        self._table = {}

    def register(self, key, value):
        self._table[key] = value


class Collector(Registry):
    pass


class Table(dict):
    pass


@dataclasses.dataclass
class Holder:
    weight: object = None


_registry = Registry()  # expect: ES001
_collector = Collector()  # expect: ES001
_table = Table()  # expect: ES001
_holder = Holder()  # expect: ES001


class Plain:
    value = None


_plain = Plain()


def through_instance(weight):
    _plain.value = weight  # expect: ES001


def memoize(fn):
    results = {}  # expect: ES001

    @functools.wraps(fn)
    def wrapper(key):
        if key not in results:
            results[key] = fn(key)
        return results[key]

    return wrapper
