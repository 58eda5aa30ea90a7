"""Thirteen ways to break a graph that the usual gates let pass. `test_corpus.py` says how programs are written."""

# ruff: noqa: PTH123, RET504, SIM115
# Written the way users write, faults included.

import logging
import threading
import time
import zlib

import torch

LOG = logging.getLogger(__name__)
LOCK = threading.Lock()


@torch._dynamo.disable
def helper(x):
    return x.cos()


def gate_print():
    """GB0059"""

    def fn(x):
        y = x.sin()
        print("in the middle")  # break
        return y + 1

    return fn, (torch.ones(4),)


def gate_item():
    """GB0124"""

    def fn(x):
        scale = x.abs().max().item()  # break
        return x / scale

    return fn, (torch.ones(4),)


def gate_branch():
    """GB0170"""

    def fn(x):
        y = x.sin()
        if y.mean() > 0:  # break
            return y * 2
        return y

    return fn, (torch.ones(4),)


def gate_logger():
    """GB0291"""

    def fn(x):
        y = x.sin()
        LOG.info("shape %s", y.shape)  # break
        return y + 1

    return fn, (torch.ones(4),)


def gate_print_in_loop():
    """GB0059"""

    def fn(x):
        for step in range(3):
            x = x.sin()
            print("step", step)  # break
        return x

    return fn, (torch.ones(4),)


def gate_try_finally():
    """GB0059"""

    def fn(x):
        try:
            y = x.sin()
            print("inside")  # break
        finally:
            z = x.cos()
        return y + z

    return fn, (torch.ones(4),)


def gate_context_manager():
    """GB0142"""

    def fn(x):
        y = x.sin()
        with LOCK:  # break
            y = y + 1
        return y

    return fn, (torch.ones(4),)


def gate_boolean_index():
    """GB0036"""

    def fn(x):
        y = x.sin()
        return y[y > 0].sum()  # break

    return fn, (torch.ones(4),)


def gate_disable():
    """GB0098"""

    def fn(x):
        y = helper(x.sin())  # break
        return y + 1

    return fn, (torch.ones(4),)


def gate_time():
    """GB0007"""

    def fn(x):
        begin = time.time()  # break
        return x.sin(), begin > 0

    return fn, (torch.ones(4),)


def gate_open():
    """GB0059"""

    def fn(x):
        y = x.sin()
        stream = open("/dev/null")  # break
        stream.close()
        return y + 1

    return fn, (torch.ones(4),)


def gate_c_function():
    """GB0007"""

    def fn(x):
        y = x.sin()
        return y + zlib.crc32(b"abc") % 3  # break

    return fn, (torch.ones(4),)


def gate_backward():
    """GB0123"""

    def fn(w, x):
        loss = (w * x).sum()
        loss.backward()  # break
        return w.grad * 2

    return fn, (torch.ones(4, requires_grad=True), torch.ones(4))
