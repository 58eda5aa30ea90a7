"""Methods and attributes of tensors. `test_corpus.py` says how programs are written."""

# ruff: noqa: SIM105
# Written the way users write, faults included.

import threading

import torch


def threading_lock():
    return threading.Lock()


def resize():
    """GB0126"""

    def fn(x):
        y = x.clone()
        y.resize_(2)  # break
        return y + 1

    def fixed(x):
        return x.clone()[:2] + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def resize_as():
    """GB0127"""

    def fn(x, other):
        y = x.clone()
        y.resize_as_(other)  # break
        return y + 1

    return fn, (torch.ones(3), torch.ones(2))


def sparse_resize():
    """GB0129"""

    def fn(x):
        y = x + 1
        try:
            y.sparse_resize_((2,), 1, 0)  # break
        except RuntimeError:
            pass
        return y

    return fn, (torch.ones(3),)


def sparse_resize_and_clear():
    """GB0130"""

    def fn(x):
        y = x + 1
        try:
            y.sparse_resize_and_clear_((2,), 1, 0)  # break
        except RuntimeError:
            pass
        return y

    return fn, (torch.ones(3),)


def set_storage():
    """GB0128"""

    def fn(x, other):
        y = x + 1
        y.set_(other.untyped_storage(), 0, (2,))  # break
        return y

    return fn, (torch.ones(3), torch.zeros(4))


def requires_grad_method():
    """GB0125"""

    def fn(x):
        x.requires_grad_()  # break
        return x * 2

    def fixed(x):
        return x * 2

    return fn, (torch.ones(3),), {"fixed": fixed, "fixed_arguments": (torch.ones(3, requires_grad=True),)}


def requires_grad_attribute():
    """GB0206"""

    def fn(x):
        x.requires_grad = True  # break
        return x * 2

    return fn, (torch.ones(3),)


def intermediate_requires_grad():
    """GB8985"""

    def fn(x):
        y = x.sin()
        z = y.detach().requires_grad_()  # break
        return z * 2

    return fn, (torch.ones(3),)


def retain_grad():
    """GB0108"""

    def fn(x):
        y = x * 2
        y.retain_grad()  # break
        return y + 1

    return fn, (torch.ones(3, requires_grad=True),)


def grad_fn():
    """GB0104"""

    def fn(x):
        y = x * 2
        name = y.grad_fn  # break
        return y + 1, name is None

    def fixed(x):
        y = x * 2
        return y + 1, not y.requires_grad

    return fn, (torch.ones(3, requires_grad=True),), {"fixed": fixed}


def random_fill():
    """GB0107"""

    def fn(x):
        y = torch.empty_like(x)
        y.random_(0, 5)  # break
        return y * 0

    def fixed(x):
        y = torch.randint_like(x, 0, 5)
        return y * 0

    return fn, (torch.ones(3),), {"fixed": fixed}


def uniform_from():
    """GB0110"""

    def fn(x):
        y = torch.empty_like(x)
        y.uniform_(**{"from": 0.0, "to": 1.0})  # break
        return y * 0

    def fixed(x):
        y = torch.empty_like(x)
        y.uniform_(0.0, 1.0)
        return y * 0

    return fn, (torch.ones(3),), {"fixed": fixed}


def bad_arguments():
    """GB0117"""

    def fn(x):
        try:
            return x.dim(1)  # break
        except TypeError:
            return x

    return fn, (torch.ones(3),)


def argument_type():
    """GB0055"""

    def fn(x, box):
        try:
            return x.add(box)  # break
        except TypeError:
            return x

    return fn, (torch.ones(3), threading_lock())


def is_inference():
    """GB0045"""

    def fn(x):
        if x.is_inference():  # break
            return x + 1
        return x - 1

    def fixed(x):
        return x - 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def inference_mode_enabled():
    """GB0046"""

    def fn(x):
        if torch.is_inference_mode_enabled():  # break
            return x + 1
        return x - 1

    def fixed(x):
        if torch.is_grad_enabled():
            return x - 1
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def as_subclass():
    """GB0001"""

    def fn(x):
        return x.sin().as_subclass(torch.nn.Parameter)  # break

    return fn, (torch.ones(3),)


def share_memory():
    """GB0117"""

    def fn(x):
        y = x + 1
        y.share_memory_()  # break
        return y * 2

    return fn, (torch.ones(3),)


def data_of_intermediate():
    """GB0056"""

    def fn(x):
        y = x.sin()
        y.data = torch.zeros(3)  # break
        return y + 1

    def fixed(x):
        y = x.sin()
        with torch.no_grad():
            y.copy_(torch.zeros(3))
        return y + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def data_other_dtype():
    """GB0220"""

    def fn(x):
        x.data = x.data.double()  # break
        return x + 1

    return fn, (torch.ones(3),)


def set_real():
    """GB0058"""

    def fn(x):
        y = x + 1
        y.real = torch.zeros(3)  # break
        return y

    def fixed(x):
        y = x + 1
        y.copy_(torch.zeros(3))
        return y

    return fn, (torch.ones(3),), {"fixed": fixed}


def data_pointer():
    """GB5976"""

    def fn(x, y):
        if x.data_ptr() == y.data_ptr():  # break
            return x + 1
        return x + y

    def fixed(x, y):
        if x is y:
            return x + 1
        return x + y

    return fn, (torch.ones(3), torch.ones(3)), {"fixed": fixed}
