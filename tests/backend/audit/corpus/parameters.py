"""Parameters made while compiled. `test_corpus.py` says how programs are written."""

# ruff: noqa: F841, SIM105
# Written the way users write, faults included.

import torch


class Tagged(torch.Tensor):
    pass


def parameter_constructor():
    """GB0264"""

    def fn(x):
        w = torch.nn.Parameter(x * 2)  # break
        return w + 1

    return fn, (torch.ones(3),)


def parameter_of_list():
    """GB0226"""

    def fn(x):
        try:
            w = torch.nn.Parameter([1.0])  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def parameter_requires_grad():
    """GB0237"""

    def fn(x):
        w = torch.nn.Parameter(x, requires_grad=x.sum() > 0)  # break
        return w + 1

    return fn, (torch.ones(3),)


def parameter_of_subclass():
    """GB0227"""

    def fn(x):
        w = torch.nn.Parameter(x.sin().as_subclass(Tagged))  # break
        return w + 1

    return fn, (torch.ones(3),), {"config": {"graph_break_on_nn_param_ctor": False}}


def parameter_not_traceable():
    """GB0228"""
    from torch._dynamo.create_parameter_op import do_not_convert_to_tracable_parameter

    def fn(x):
        w = torch.nn.Parameter(x.sin())  # break
        return w + 1

    def call(x):
        with do_not_convert_to_tracable_parameter():
            return fn(x)

    return call, (torch.ones(3),), {"config": {"graph_break_on_nn_param_ctor": False}}


def parameter_dynamic_shape():
    """GB0235"""

    def fn(x):
        w = torch.nn.Parameter(x.sin())  # break
        return w + 1

    return fn, (torch.ones(3),), {"config": {"graph_break_on_nn_param_ctor": False}, "compile": {"dynamic": True}}
