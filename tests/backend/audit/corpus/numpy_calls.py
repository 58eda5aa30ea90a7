"""NumPy inside compiled functions. `test_corpus.py` says how programs are written."""

# ruff: noqa: B018, SIM105
# Written the way users write, faults included.

import numpy as np
import torch


def unsupported_function():
    """GB0294"""

    def fn(x):
        a = x.numpy()
        return torch.from_numpy(np.unwrap(a))  # break

    return fn, (torch.ones(3),)


def trace_numpy_off():
    """GB0293"""

    def fn(x):
        y = x + 1
        return y * np.sqrt(4.0)  # break

    def fixed(x):
        y = x + 1
        return y * 2.0

    return fn, (torch.ones(3),), {"config": {"trace_numpy": False}, "fixed": fixed}


def numpy_method_off():
    """GB0105"""

    def fn(x):
        a = x.numpy()  # break
        return x + float(a.sum())

    return fn, (torch.ones(3),), {"config": {"trace_numpy": False}}


def from_numpy_off():
    """GB0231"""

    def fn(x, a):
        return x + torch.from_numpy(a)  # break

    return fn, (torch.ones(3, dtype=torch.float64), np.ones(3)), {"config": {"trace_numpy": False}}


def random_stream():
    """GB0298"""

    def fn(x):
        noise = np.random.uniform(size=3)  # break
        return x + torch.from_numpy(noise) * 0

    def fixed(x):
        return x + torch.rand(3, dtype=torch.float64) * 0

    return fn, (torch.ones(3, dtype=torch.float64),), {"config": {"use_numpy_random_stream": True}, "fixed": fixed}


def constant_collection():
    """GB0300"""

    def fn(x):
        a = x.numpy()
        info = np.finfo(a)  # break
        return x + float(info.eps)

    return fn, (torch.ones(3),)


def as_method():
    """GB0290"""

    def fn(x):
        a = x.numpy()
        return torch.from_numpy(np.add.reduce(a, keepdims=True))  # break

    return fn, (torch.ones(3),)


def flags():
    """GB0157"""

    def fn(x):
        a = x.numpy()
        if a.flags.c_contiguous:  # break
            return x + 1
        return x

    return fn, (torch.ones(3),)


def version_attribute():
    """GB0159"""

    def fn(x):
        a = x.numpy()
        try:
            a.__version__  # break
        except AttributeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def object_dtype():
    """GB0250"""

    def fn(x):
        a = x.numpy()
        b = a.astype(object)  # break
        return x + len(b)

    return fn, (torch.ones(3),)


def tobytes():
    """GB0158"""

    def fn(x):
        a = x.numpy()
        return x + len(a.tobytes())  # break

    def fixed(x):
        return x + x.nbytes

    return fn, (torch.ones(3),), {"fixed": fixed}


def object_array():
    """GB0185"""

    def fn(x, a):
        return x + a[0]  # break

    return fn, (torch.ones(3), np.array([1, "a"], dtype=object))


def string_array():
    """GB0185"""

    def fn(x, names):
        return x + len(names)  # break

    return fn, (torch.ones(3), np.array(["a", "b"]))
