"""Functions that Dynamo is told, or has decided, not to trace. `test_corpus.py` says how programs are written."""

# Written the way users write, faults included.

import logging
import unittest

import torch
import torch._dynamo.comptime


class Box:
    def __init__(self, t):
        self.t = t


def graph_break():
    """GB0025"""

    def fn(x):
        y = x + 1
        torch._dynamo.graph_break()  # break
        return y * 2

    def fixed(x):
        return (x + 1) * 2

    return fn, (torch.ones(3),), {"fixed": fixed}


def skip_frame():
    """GB4297"""

    def fn(x):
        y = x + 1
        torch._dynamo.skip_frame()  # break
        return y * 2

    return fn, (torch.ones(3),)


def step_unsupported():
    """GB0275"""

    def fn(x):
        y = x + 1
        torch._dynamo.step_unsupported()  # break
        return y * 2

    return fn, (torch.ones(3),)


def disabled_call():
    """GB0098"""

    @torch.compiler.disable
    def helper(x):
        return x + 1

    def fn(x):
        y = helper(x.sin())  # break
        return y * 2

    def fixed(x):
        y = x.sin() + 1
        return y * 2

    return fn, (torch.ones(3),), {"fixed": fixed}


def disabled_not_recursive():
    """GB0099"""

    @torch.compiler.disable(recursive=False)
    def helper(x):
        return x + 1

    def fn(x):
        y = helper(x.sin())  # break
        return y * 2

    return fn, (torch.ones(3),)


def skipped_function():
    """GB0007"""

    def fn(x):
        unittest.skip("why")  # break
        return x + 1

    return fn, (torch.ones(3),)


def skipped_method():
    """GB0008"""

    class Holder:
        skip = unittest.skip

    def fn(x):
        Holder().skip()  # break
        return x + 1

    return fn, (torch.ones(3),)


def logger():
    """GB0291"""
    log = logging.getLogger("corpus")

    def fn(x):
        y = x + 1
        log.debug("value")  # break
        return y * 2

    def fixed(x):
        y = x + 1
        if not torch.compiler.is_compiling():
            log.debug("value")
        return y * 2

    return fn, (torch.ones(3),), {"fixed": fixed}


def comptime_break():
    """GB0030"""

    def fn(x):
        y = x + 1
        torch._dynamo.comptime.comptime.graph_break()  # break
        return y * 2

    return fn, (torch.ones(3),)


def reordered():
    """GB0296"""

    def fn(x, obj):
        y = x + 1
        print(obj)  # break
        return y * 2

    return fn, (torch.ones(3), object()), {"config": {"reorderable_logging_functions": {print}}}


def compile_with_args():
    """GB0223"""

    def fn(x):
        return torch.compile(torch.sin, None)(x)  # break

    return fn, (torch.ones(3),)


def backend_error():
    """GB0219 of the whole graph"""

    def bad(gm, inputs):
        raise torch._subclasses.fake_tensor.UnsupportedFakeTensorException("no")

    def fn(x):
        return x + 1  # break

    return fn, (torch.ones(3),), {"compile": {"backend": bad}}


def nonstrict_input():
    """GB0236"""

    @torch._dynamo.nonstrict_trace
    def helper(x, box):
        return x + 1

    def fn(x, box):
        return helper(x, box)  # break

    return fn, (torch.ones(3), Box(1))


def nonstrict_output():
    """GB0251"""

    @torch._dynamo.nonstrict_trace
    def helper(x):
        return Box(x)

    def fn(x):
        return helper(x).t  # break

    return fn, (torch.ones(3),)


def nonstrict_constant():
    """GB0238"""

    class P:
        def __init__(self, a):
            self.a = a

        def __eq__(self, o):
            return True

        def __hash__(self):
            return 1

    import torch.utils._pytree as pt

    pt.register_constant(P)

    @torch._dynamo.nonstrict_trace
    def h(x, p):
        return x + p.a

    def fn(x):
        p = P(3)
        return h(x, p)  # break

    return fn, (torch.ones(3),)


def assume_constant():
    """GB2520"""

    @torch._dynamo.assume_constant_result
    def helper(g):
        return 1

    def fn(x):
        y = x + 1
        return y * helper(iter([y]))  # break

    return fn, (torch.ones(3),)
