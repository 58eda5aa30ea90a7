"""Context managers, try and loops. `test_corpus.py` says how programs are written."""

# ruff: noqa: RET504
# Written the way users write, faults included.

import contextlib
import io
import threading

import torch


class Manager:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def lock():
    """GB0142"""
    mutex = threading.Lock()

    def fn(x):
        y = x + 1
        with mutex:  # break
            y = y * 2
        return y

    def fixed(x):
        y = x + 1
        return y * 2

    return fn, (torch.ones(3),), {"fixed": fixed}


def not_a_manager():
    """GB0142"""

    def fn(x, value):
        try:
            with value:  # break
                return x + 1
        except TypeError:
            return x

    return fn, (torch.ones(3), 3)


def break_inside_user_manager():
    """GB0066"""

    def fn(x):
        with Manager():
            y = x + 1
            torch._dynamo.graph_break()  # break
            return y * 2

    return fn, (torch.ones(3),)


def break_inside_grad_mode():
    """GB0059"""

    def fn(x):
        with torch.no_grad():
            y = x + 1
            print("here")  # break
            return y * 2

    return fn, (torch.ones(3),)


def print_in_try():
    """GB0059"""

    def fn(x):
        try:
            y = x + 1
            print("here")  # break
            return y * 2
        finally:
            x.sum()

    def fixed(x):
        try:
            y = x + 1
            if not torch.compiler.is_compiling():
                print("here")
            return y * 2
        finally:
            x.sum()

    return fn, (torch.ones(3),), {"fixed": fixed}


def print_in_loop():
    """GB0059"""

    def fn(x):
        for i in range(3):
            x = x + i
            print("step", i)  # break
        return x

    def fixed(x):
        for i in range(3):
            x = x + i
            if not torch.compiler.is_compiling():
                print("step", i)
        return x

    return fn, (torch.ones(3),), {"fixed": fixed}


def not_a_generator():
    """GB0221"""

    @contextlib.contextmanager
    def manager():
        return iter([1])

    def fn(x):
        with manager():  # break
            return x + 1

    return fn, (torch.ones(3),)


def returned_manager():
    """GB2533"""

    @contextlib.contextmanager
    def manager():
        yield 1

    def fn(x):
        ctx = manager()
        return x + 1, ctx  # break

    return fn, (torch.ones(3),)


def profiler_escapes():
    """GB0212"""

    def fn(x):
        ctx = torch.profiler.profile()
        return x + 1, ctx  # break

    return fn, (torch.ones(3),)


def version_counter_escapes():
    """GB0209"""

    def fn(x):
        ctx = torch.autograd._unsafe_preserve_version_counter(x)
        return x + 1, ctx  # break

    return fn, (torch.ones(3),)


def manager_disabled():
    """GB0263"""

    @contextlib.contextmanager
    def manager():
        yield 1

    def fn(x):
        with manager():  # break
            return x + 1

    return fn, (torch.ones(3),), {"config": {"enable_trace_contextlib": False}}


def enter_method():
    """GB0066"""

    def fn(x):
        with Manager() as p:
            y = x + 1
            torch._dynamo.graph_break()  # break
            return y * 2, p

    return fn, (torch.ones(3),)


def redirect_stdout():
    """GB0262"""

    def fn(x):
        with contextlib.redirect_stdout(io.StringIO()):  # break
            y = x + 1
        return y

    return fn, (torch.ones(3),)


def annotate_inside():
    """GB0279"""

    def fn(x):
        with torch.fx.traceback.annotate({"a": 1}):
            torch._dynamo.graph_break()  # break
            y = x + 1
        return y

    return fn, (torch.ones(3),)
