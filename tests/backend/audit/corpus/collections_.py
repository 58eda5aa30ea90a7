"""Containers, iterators and identity. `test_corpus.py` says how programs are written."""

# ruff: noqa: B007, F841, SIM105
# Written the way users write, faults included.

import array
import collections
import decimal
import itertools
import types

import torch


class Plain:
    def __init__(self):
        self.value = 1


def deque_arguments():
    """GB0258"""

    def fn(x):
        try:
            collections.deque([1], 2, 3)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def len_in_c():
    """GB6012"""
    import array

    def fn(x, values):
        return x + len(values)  # break

    return fn, (torch.ones(3), array.array("i", [1, 2])), {"fixed": fn, "fixed_arguments": (torch.ones(3), [1, 2])}


def array_item():
    """GB4880"""

    def fn(x, a):
        return x + a[0]  # break

    return fn, (torch.ones(3), array.array("i", [1])), {"fixed": fn, "fixed_arguments": (torch.ones(3), [1])}


def array_assign():
    """GB7786"""

    def fn(x, a):
        a[0] = 3  # break
        return x + 1

    return fn, (torch.ones(3), array.array("i", [1]))


def array_contains():
    """GB4411"""

    def fn(x, a):
        return x + (1 in a)  # break

    return fn, (torch.ones(3), array.array("i", [1]))


def array_repeat():
    """GB9458"""

    def fn(x, a):
        b = a * 2  # break
        return x + 1

    return fn, (torch.ones(3), array.array("i", [1]))


def array_repeat_in_place():
    """GB9561"""

    def fn(x, a):
        a *= 2  # break
        return x + 1

    return fn, (torch.ones(3), array.array("i", [1]))


def decimal_negate():
    """GB0156"""

    def fn(x, d):
        b = -d  # break
        return x + 1

    return fn, (torch.ones(3), decimal.Decimal(3)), {"fixed": fn, "fixed_arguments": (torch.ones(3), 3.0)}


def decimal_add():
    """GB0808"""

    def fn(x, d):
        b = d + d  # break
        return x + 1

    return fn, (torch.ones(3), decimal.Decimal(3))


def generator_method():
    """GB4347"""

    def values():
        yield 1
        yield 2

    def fn(x, gen):
        return x + next(gen)  # break

    def fixed(x, gen):
        return x + gen[0]

    return fn, (torch.ones(3), values()), {"fixed": fixed, "fixed_arguments": (torch.ones(3), list(values()))}


def mapping_proxy_keys():
    """GB0204"""

    def fn(x, proxy):
        return x + len(proxy)  # break

    return fn, (torch.ones(3), types.MappingProxyType({Plain(): 1}))


def mapping_proxy_mutated():
    """GB0198"""

    def fn(x, proxy, d):
        d["b"] = 2
        return x + proxy["a"]  # break

    d = {"a": 1}
    return fn, (torch.ones(3), types.MappingProxyType(d), d)


def dict_keys_input():
    """GB0203"""

    def fn(x, keys):
        return x + len(keys)  # break

    return fn, (torch.ones(3), {Plain(): 1}.keys())


def dict_values_input():
    """GB0811"""

    def fn(x, values):
        for v in values:  # break
            x = x + v
        return x

    def fixed(x, values):
        for v in (1, 2):
            x = x + v
        return x

    return fn, (torch.ones(3), {"a": 1, "b": 2}.values()), {"fixed": fixed}


def build_set():
    """GB0200"""

    def fn(x):
        return x + len({1, 2})  # break

    return fn, (torch.ones(3),), {"config": {"inject_BUILD_SET_unimplemented_TESTING_ONLY": True}}


def product_keyword():
    """GB0268"""

    def fn(x):
        try:
            itertools.product([1], times=2)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def groupby_keyword():
    """GB0155"""

    def fn(x):
        try:
            itertools.groupby([1], by=2)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def groupby_two():
    """GB0134"""

    def fn(x):
        for k, v in itertools.groupby([1, 1, 2], lambda a: a > 1):  # break
            x = x + 1
        return x

    def fixed(x):
        for k, v in itertools.groupby([1, 1, 2], key=lambda a: a > 1):
            x = x + 1
        return x

    return fn, (torch.ones(3),), {"fixed": fixed}


def groupby_tensor_key():
    """GB0115"""

    def fn(x):
        for k, v in itertools.groupby([x, x], key=lambda a: a):  # break
            x = x + 1
        return x

    return fn, (torch.ones(1),)


def call_object():
    """GB0147"""

    def fn(x, obj):
        try:
            return obj(x)  # break
        except TypeError:
            return x

    return fn, (torch.ones(3), Plain())


def id_compare():
    """GB9316"""

    def fn(x):
        items = [1]
        if id(items) > 5:  # break
            return x + 1
        return x

    return fn, (torch.ones(3),)


def id_returned():
    """GB4501"""

    def fn(x):
        items = [1]
        return x + 1, id(items)  # break

    return fn, (torch.ones(3),)
