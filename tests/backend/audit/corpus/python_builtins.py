"""Builtin functions, the standard library and C functions. `test_corpus.py` says how programs are written."""

# ruff: noqa: B010, B028, F841, PTH123, SIM105
# Written the way users write, faults included.

import copy
import datetime
import decimal
import functools
import inspect
import io
import random
import re
import time

import torch


def print_call():
    """GB0059"""

    def fn(x):
        y = x.sin()
        print("here", y.shape)  # break
        return y.cos()

    def fixed(x):
        y = x.sin()
        if not torch.compiler.is_compiling():
            print("here", y.shape)
        return y.cos()

    return fn, (torch.ones(3),), {"fixed": fixed}


def open_file():
    """GB0059"""

    def fn(x):
        with open("/dev/null", "w") as out:  # break
            out.write("x")
        return x + 1

    def fixed(x):
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def deepcopy_tensor():
    """GB4198"""

    def fn(x):
        return copy.deepcopy(x) + 1  # break

    def fixed(x):
        return x.clone() + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def issubclass_call():
    """GB4393"""

    def fn(x):
        return x + issubclass(x, int)  # break

    return fn, (torch.ones(3),)


def repr_tensor():
    """GB0569"""

    def fn(x):
        return x + len(repr(x))  # break

    return fn, (torch.ones(3),)


def clock():
    """GB0007"""

    def fn(x):
        start = time.time()  # break
        y = x.sin()
        return y, time.time() - start

    return fn, (torch.ones(3),)


def datetime_now():
    """GB0156"""

    def fn(x):
        b = datetime.datetime.now()  # break
        return x + 1

    return fn, (torch.ones(3),)


def c_function():
    """GB0007"""
    import zlib

    def fn(x):
        return x + zlib.crc32(b"abc") % 7  # break

    def fixed(x, crc):
        return x + crc % 7

    return fn, (torch.ones(3),), {"fixed": fixed, "fixed_arguments": (torch.ones(3), zlib.crc32(b"abc"))}


def partial_without():
    """GB0260"""

    def fn(x):
        try:
            functools.partial()  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def inspect_call():
    """GB0007"""

    def fn(x):
        frame = inspect.currentframe()  # break
        return x + 1

    return fn, (torch.ones(3),)


def setattr_call():
    """GB0467"""

    def fn(x, s):
        try:
            setattr(3, "y", 1)  # break
        except AttributeError:
            pass
        return x + 1

    return fn, (torch.ones(3), 3)


def getattr_of_tensor_name():
    """GB0190"""

    def fn(x):
        name = x.sum()
        try:
            return getattr(x, name)  # break
        except TypeError:
            return x + 1

    return fn, (torch.ones(3),)


def str_in_c():
    """GB0005"""

    def fn(x, c):
        return x + len(str(c))  # break

    return fn, (torch.ones(3), decimal.Decimal(3))


def hasattr_slice():
    """GB0150"""

    def fn(x):
        return x + hasattr(slice(1), "foo")  # break

    return fn, (torch.ones(3),)


def hasattr_super():
    """GB0150"""

    class A:
        def f(self):
            return hasattr(super(), "foo")  # break

    def fn(x, a):
        return x + a.f()

    return fn, (torch.ones(3), A())


def environment_variable():
    """GB0007"""
    import os

    def fn(x):
        os.environ["A3"] = "1"  # break
        return x + 1

    def fixed(x):
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def warnings_warn():
    """GB0007"""
    import warnings

    def fn(x):
        warnings.warn("a")  # break
        return x + 1

    def fixed(x):
        if not torch.compiler.is_compiling():
            warnings.warn("a")
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def subprocess_run():
    """GB0007"""
    import subprocess

    def fn(x):
        subprocess.run(["true"])  # break
        return x + 1

    return fn, (torch.ones(3),)


def torch_save():
    """GB0007"""

    def fn(x):
        torch.save(x, io.BytesIO())  # break
        return x + 1

    return fn, (torch.ones(3),)


def manual_seed():
    """GB0007"""

    def fn(x):
        torch.manual_seed(3)  # break
        return x + 1

    def fixed(x):
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def thread_count():
    """GB0007"""

    def fn(x):
        torch.set_num_threads(torch.get_num_threads())  # break
        return x + 1

    return fn, (torch.ones(3),)


def random_arithmetic():
    """GB0213"""

    def fn(x):
        r = random.Random(3)
        return x + r.random() * 2  # break

    return fn, (torch.ones(3),)


def regex_result():
    """GB0292"""
    pattern = re.compile("a+")

    def fn(x):
        return x + len(list(pattern.finditer("aab")))  # break

    return fn, (torch.ones(3),)


def random_arguments():
    """GB0297"""

    def fn(x):
        random.Random(x=3)  # break
        return x + 1

    def fixed(x):
        random.Random(3)
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}
