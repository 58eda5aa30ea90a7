"""Control flow operators called the wrong way: they raise. `test_corpus.py` says how programs are written."""

# Written the way users write, faults included.

import torch
from torch._higher_order_ops.while_loop import while_loop


def cond_operands():
    """GB0311"""

    def fn(x):
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, x)  # break

    return fn, (torch.ones(3),)


def cond_operand_contents():
    """GB0312"""

    def fn(x, obj):
        return torch.cond(x.sum() > 0, lambda t, o: t + 1, lambda t, o: t - 1, (x, obj))  # break

    return fn, (torch.ones(3), object())


def cond_mutates():
    """GB0041"""

    def fn(x):
        return torch.cond(x.sum() > 0, lambda t: t.add_(1), lambda t: t - 1, (x,))  # break

    return fn, (torch.ones(3),)


def cond_aliases():
    """GB0040"""

    def fn(x):
        return torch.cond(x.sum() > 0, lambda t: t.view(-1), lambda t: t.view(-1), (x,))  # break

    return fn, (torch.ones(3),)


def cond_not_callable():
    """GB0302"""

    def fn(x):
        return torch.cond(x.sum() > 0, 3, lambda t: t - 1, (x,))  # break

    return fn, (torch.ones(3),)


def while_condition():
    """GB0308"""

    def fn(x):
        return while_loop(lambda t: t < 3, lambda t: (t + 1,), (x,))  # break

    return fn, (torch.zeros(3),)


def while_forever():
    """GB0339"""

    def fn(x):
        return while_loop(lambda t: True, lambda t: (t + 1,), (x,))  # break

    return fn, (torch.zeros(3),)


def map_scalar():
    """GB0326"""

    def fn(x):
        return torch.ops.higher_order.map_impl(lambda t: t + 1, [x], [])  # break

    return fn, (torch.ones(()),)


def map_keyword():
    """GB0325"""

    def fn(x):
        return torch.ops.higher_order.map_impl(lambda t: t + 1, xs=x)  # break

    return fn, (torch.ones(3),)


def hints_wrapper():
    """GB0335"""

    def fn(x):
        return torch.ops.higher_order.hints_wrapper(lambda t: t + 1, (x,), {})  # break

    return fn, (torch.ones(3),)


def strict_mode_nested():
    """GB0345"""

    def fn(x):
        return torch.ops.higher_order.strict_mode(lambda t: t[0] + 1, ([x],))  # break

    return fn, (torch.ones(3),)


def strict_mode_keyword():
    """GB0337"""

    def fn(x):
        return torch.ops.higher_order.strict_mode(lambda t: t + 1, (x,), scale=2)  # break

    return fn, (torch.ones(3),)
