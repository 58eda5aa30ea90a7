"""Modules and their hooks. `test_corpus.py` says how programs are written."""

# Written the way users write, faults included.

import torch
from torch import nn


def lstm():
    """GB0014"""
    rnn = nn.LSTM(3, 3)

    def fn(x):
        return rnn(x * 2)[0] + 1  # break

    return fn, (torch.ones(2, 3),), {"fixed": fn, "fixed_config": {"allow_rnn": True}}


def script_module():
    """GB4695"""

    class Inner(nn.Module):
        def forward(self, x):
            return x + 1

    inner = torch.jit.script(Inner())

    def fn(x):
        return inner(x * 2)  # break

    return fn, (torch.ones(3),)


def uninitialized():
    """GB0119"""

    class Broken(nn.Module):
        def __init__(self):
            pass

    broken = Broken()

    def fn(x):
        return x + isinstance(broken, nn.Module)  # break

    return fn, (torch.ones(3),)


def backward_hook():
    """GB0083"""

    class Inner(nn.Module):
        def forward(self, x):
            return x * 2

    m = Inner()
    m.register_full_backward_hook(lambda *args: None)

    def fn(x):
        y = x + 1
        return m(y)  # break

    return fn, (torch.ones(3, requires_grad=True),)


def print_in_hook():
    """GB0059"""

    class Inner(nn.Module):
        def forward(self, x):
            return x * 2

    def hook(module, args, output):
        print("hook")  # break
        return output

    m = Inner()
    m.register_forward_hook(hook)

    def fn(x):
        return m(x + 1) + 1

    return fn, (torch.ones(3),)


def removable_handle():
    """GB0013"""
    m = nn.Linear(3, 3)
    handle = m.register_forward_hook(lambda *args: None)

    def fn(x):
        handle.remove()  # break
        return x + 1

    return fn, (torch.ones(3),)


def super_init_late():
    """GB0162"""

    class Odd(nn.Module):
        def reset(self):
            super().__init__()  # break

        def forward(self, x):
            self.reset()
            return x + 1

    m = Odd()

    def fn(x):
        return m(x)

    return fn, (torch.ones(3),)


def module_key():
    """GB0124"""
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def fn(x, i):
        return layers[i](x)  # break

    return fn, (torch.ones(3), torch.tensor(1))


def disabled_module():
    """GB0148"""
    m = torch.compile(nn.Linear(3, 3))
    m.forward = torch.compiler.disable(m.forward)

    def fn(x):
        return m(x) + 1  # break

    return fn, (torch.ones(3),)


def apply_method():
    """GB0117"""
    m = nn.Linear(3, 3)

    def fn(x):
        m.share_memory()  # break
        return m(x)

    return fn, (torch.ones(3),)
