"""Classes and objects: the data model of Python. `test_corpus.py` says how programs are written."""

# ruff: noqa: F841, SIM105, UP006
# Written the way users write, faults included.

import collections
import decimal
import functools
import types
import typing

import torch


class Plain:
    def __init__(self):
        self.value = 1


def typed_dict_optional():
    """GB0257"""

    class Options(typing.TypedDict, total=False):
        scale: float

    def fn(x):
        options = Options(scale=2.0)  # break
        return x * options["scale"]

    def fixed(x):
        options = {"scale": 2.0}
        return x * options["scale"]

    return fn, (torch.ones(3),), {"fixed": fixed}


def class_assignment():
    """GB4271"""

    class Other(Plain):
        pass

    def fn(x, obj):
        obj.__class__ = Other  # break
        return x + obj.value

    return fn, (torch.ones(3), Plain())


def setattr_tensor_name():
    """GB0254"""

    class Odd:
        pass

    def fn(x, obj, names):
        try:
            setattr(obj, names, 2)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3), Odd(), torch.ones(1))


def getattr_not_function():
    """GB0256"""

    class Odd:
        __getattr__ = functools.partial(lambda *args: 3)

    def fn(x, obj):
        return x + obj.missing  # break

    return fn, (torch.ones(3), Odd())


def torch_generator():
    """GB7650"""

    def fn(x, generator):
        generator.manual_seed(3)  # break
        return x + 1

    return fn, (torch.ones(3), torch.Generator())


def repr_in_c():
    """GB2852"""
    import decimal

    class Money(decimal.Decimal):
        pass

    def fn(x, m):
        return x + len(repr(m))  # break

    return fn, (torch.ones(3), Money(3))


def decimal_repr():
    """GB2852"""

    def fn(x, d):
        return x + len(repr(d))  # break

    return fn, (torch.ones(3), decimal.Decimal(3))


def super_not_method():
    """GB0006"""

    class Base:
        helper = 3
        call = functools.partial(max, 3)

    class Child(Base):
        def call(self, x):
            return super().call(2) + x  # break

    def fn(x, obj):
        return obj.call(x)

    return fn, (torch.ones(3), Child())


def super_missing():
    """GB0113"""

    class Base:
        pass

    class Child(Base):
        def call(self, x):
            try:
                return super().nothing(x)  # break
            except AttributeError:
                return x

    def fn(x, obj):
        return obj.call(x)

    return fn, (torch.ones(3), Child())


def super_one_argument():
    """GB0193"""

    class Child(Plain):
        def call(self, x):
            return x + len(super(Child).__doc__)  # break

    def fn(x, obj):
        return obj.call(x)

    return fn, (torch.ones(3), Child())


def super_delattr_name():
    """GB0084"""

    class Child(Plain):
        def drop(self, name):
            super().__delattr__(name)  # break

    def fn(x, obj, name):
        try:
            obj.drop(name)
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3), Child(), torch.ones(1))


def pydantic_like():
    """GB3383"""
    import pydantic.dataclasses

    @pydantic.dataclasses.dataclass
    class Options:
        scale: int = 2

    def fn(x):
        options = Options(scale=3)  # break
        return x * options.scale

    return fn, (torch.ones(3),)


def object_new():
    """GB7502"""

    class Own(types.ModuleType):
        pass

    def fn(x):
        m = object.__new__(type(iter([])))  # break
        return x + 1

    return fn, (torch.ones(3),)


def local_class():
    """GB8977"""

    def fn(x):
        class L:  # break
            v = 2

        return x + L.v

    class L:
        v = 2

    def fixed(x):
        return x + L.v

    return fn, (torch.ones(3),), {"fixed": fixed}


def type_subscript():
    """GB9137"""

    def fn(x):
        kind = typing.List[x]  # break
        return x + 1

    return fn, (torch.ones(3),)


def typing_copy_with():
    """GB0116"""

    def fn(x):
        t = typing.List[int].copy_with((str,))  # break
        return x + 1

    return fn, (torch.ones(3),)


def namedtuple_fields():
    """GB0201"""

    def fn(x, names):
        T = collections.namedtuple("T", names)  # break
        return x + 1

    return fn, (torch.ones(3), Plain())


def setitem_inline():
    """GB0131"""

    class B:
        def __setitem__(self, k, v):
            pass

    def fn(x):
        B.__setitem__(3, 1, 2)  # break
        return x + 1

    return fn, (torch.ones(3),)


def dict_replaced():
    """GB7637"""

    class Q:
        pass

    def fn(x, q):
        q.__dict__ = {"v": 1, 4: 5}
        return x + q.v  # break

    return fn, (torch.ones(3), Q())
