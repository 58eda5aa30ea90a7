"""Parameters, gradients and hooks. `test_corpus.py` says how programs are written."""

# ruff: noqa: BLE001, F841, SIM105
# Written the way users write, faults included.

import torch

HANDLE = None


def backward_call():
    """GB0123"""

    def fn(w, x):
        loss = (w * x).sum()
        loss.backward()  # break
        return w.grad * 2

    return (
        fn,
        (torch.ones(3, requires_grad=True), torch.ones(3)),
        {"fixed": fn, "fixed_config": {"trace_autograd_ops": True}},
    )


def grad_call():
    """GB9186"""

    def fn(w, x):
        loss = (w * x).sum()
        (g,) = torch.autograd.grad(loss, [w])  # break
        return g * 2

    return (
        fn,
        (torch.ones(3, requires_grad=True), torch.ones(3)),
        {"config": {"trace_autograd_ops": False}, "fixed": fn, "fixed_config": {"trace_autograd_ops": True}},
    )


def grad_consumed():
    """GB4927"""

    def fn(w):
        y = w.sin()
        (g,) = torch.autograd.grad(y.sum(), [w])  # break
        return y, g

    def fixed(w):
        y = w.sin()
        (g,) = torch.autograd.grad(y.sum(), [w])
        return y.detach(), g

    return (
        fn,
        (torch.ones(3, requires_grad=True),),
        {"config": {"trace_autograd_ops": True}, "fixed": fixed, "fixed_config": {"trace_autograd_ops": True}},
    )


def grad_external():
    """GB0372"""

    def fn(y, w):
        (g,) = torch.autograd.grad(y.sum(), [w])  # break
        return g * 2

    w = torch.ones(3, requires_grad=True)
    return fn, (w.sin(), w), {"config": {"trace_autograd_ops": True}}


def grad_argument():
    """GB6663"""

    def fn(w):
        y = w.sin().sum()
        try:
            (g,) = torch.autograd.grad(y, "w")  # break
        except Exception:
            return y
        return g * 2

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True}}


def gradient_edge():
    """GB5748"""

    def fn(w, edge):
        y = w.sin().sum()
        (g,) = torch.autograd.grad(y, [edge])  # break
        return g * 2

    w = torch.ones(3, requires_grad=True)
    return fn, (w, torch.autograd.graph.get_gradient_edge(w)), {"config": {"trace_autograd_ops": True}}


def grad_twice():
    """GB1381"""

    def fn(w):
        y = w.sin().sum()
        (a,) = torch.autograd.grad(y, [w])
        try:
            (b,) = torch.autograd.grad(y, [w])  # break
        except RuntimeError:
            b = a
        return a + b

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True}}


def grad_in_compiled_autograd():
    """GB0373"""

    def fn(w):
        y = w.sin().sum()
        (g,) = torch.autograd.grad(y, [w])  # break
        return g * 2

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True, "compiled_autograd": True}}


def backward_non_leaf():
    """GB7054"""

    def fn(w):
        y = w.sin()
        y.sum().backward(inputs=[y])  # break
        return y.detach() * 2

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True}}


def backward_created():
    """GB1042"""

    def fn(w):
        z = torch.ones(3).requires_grad_()
        (w * z).sum().backward(inputs=[z])  # break
        return w.detach() * 2

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True}}


def backward_empty():
    """GB0442"""

    def fn(w):
        try:
            w.sin().sum().backward(inputs=[])  # break
        except RuntimeError:
            pass
        return w.detach() * 2

    return fn, (torch.ones(3, requires_grad=True),), {"config": {"trace_autograd_ops": True}}


def hook_reads_strides():
    """GB7444"""

    def fn(w):
        y = w.sin()

        def hook(g):
            return g if g.is_contiguous() else g.contiguous()

        y.register_hook(hook)  # break
        return y * 2

    def fixed(w):
        y = w.sin()
        y.register_hook(lambda g: g.contiguous())
        return y * 2

    return fn, (torch.ones(3, requires_grad=True),), {"fixed": fixed}


def hook_in_global():
    """GB0100"""

    def fn(w):
        global HANDLE
        HANDLE = w.register_hook(lambda g: g * 2)  # break
        return w * 2

    return fn, (torch.ones(3, requires_grad=True),)


def optimizer_pending():
    """GB0025"""
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def fn(x):
        w.grad = x * 2
        optimizer.step()  # break
        return x + 1

    return fn, (torch.ones(3),)


def step_with_closure():
    """GB0123"""
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.1)

    def fn(x):
        optimizer.zero_grad()
        loss = (w * x).sum()
        loss.backward()  # break
        optimizer.step()
        return loss.detach()

    return fn, (torch.ones(3),)


def gradient_dtype():
    """GB0181"""
    w = torch.ones(3, requires_grad=True)
    w.grad_dtype = None
    w.grad = torch.ones(3, dtype=torch.float64)

    def fn(x):
        return x + w  # break

    return fn, (torch.ones(3),)


def queue_callback():
    """GB0166"""

    def fn(x):
        try:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: None)  # break
        except RuntimeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def engine_method():
    """GB0165"""

    def fn(x):
        b = torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # break
        return x + 1

    return fn, (torch.ones(3),)
