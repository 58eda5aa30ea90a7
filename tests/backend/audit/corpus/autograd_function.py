"""Custom `torch.autograd.Function`. `test_corpus.py` says how programs are written."""

# ruff: noqa: B018, BLE001
# Written the way users write, faults included.

import torch


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def print_in_forward():
    """GB0059"""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            print("forward")  # break
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        y = x + 1
        return Noisy.apply(y) + 1

    return fn, (torch.ones(3, requires_grad=True),)


def print_in_backward():
    """GB0059"""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            print("backward")  # break
            return g * 2

    def fn(x):
        y = x + 1
        return Noisy.apply(y) + 1

    return fn, (torch.ones(3, requires_grad=True),)


def custom_vjp():
    """GB0145"""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, g):
            return g * 2

    def fn(x):
        return Own.apply(x) + 1  # break

    return fn, (torch.ones(3, requires_grad=True),)


def custom_jvp():
    """GB0144"""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

        @staticmethod
        def jvp(ctx, t):
            return t * 2

    def fn(x):
        return Own.apply(x) + 1  # break

    return fn, (torch.ones(3, requires_grad=True),)


def keyword_only():
    """GB4372"""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *, scale=2):
            return x * scale

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        try:
            return Own.apply(x, scale=3) + 1  # break
        except TypeError:
            return x

    return fn, (torch.ones(3, requires_grad=True),)


def same_tensor_twice():
    """GB6297"""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y, g * x

    def fn(x):
        return Product.apply(x, x) + 1  # break

    def fixed(x):
        return Product.apply(x, x.view_as(x)) + 1

    return fn, (torch.ones(3, requires_grad=True),), {"fixed": fixed}


def dirty_not_returned():
    """GB2464"""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x.add_(1)
            ctx.mark_dirty(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        y = x + 1
        try:
            return InPlace.apply(y) + 1  # break
        except RuntimeError:
            return y

    return fn, (torch.ones(3, requires_grad=True),)


def materialize():
    """GB0347"""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx._materialize_non_diff_grads = False
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        return Own.apply(x) + 1  # break

    return fn, (torch.ones(3, requires_grad=True),)


def function_method():
    """GB0140"""

    def fn(x):
        Scale.name  # a class attribute: fine
        return x + Scale.mro().__len__()  # break

    return fn, (torch.ones(3),)


def context_escapes():
    """GB0019"""
    kept = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        return Own.apply(x) + 1  # break

    return fn, (torch.ones(3, requires_grad=True),)


def forward_not_a_function():
    """GB0140"""

    class Own(torch.autograd.Function):
        forward = torch.sin

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def fn(x):
        y = x + 1
        return Own.forward(y) + 1  # break

    return fn, (torch.ones(3),)


def forward_is_builtin():
    """GB0346"""

    class F(torch.autograd.Function):
        forward = staticmethod(torch.sin)

        @staticmethod
        def backward(ctx, g):
            return g

    def fn(x):
        try:
            return F.apply(x) + 1  # break
        except Exception:
            return x

    return fn, (torch.ones(3, requires_grad=True),)


def backward_is_builtin():
    """GB0346"""

    class F(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        backward = staticmethod(torch.add)

    def fn(x):
        return F.apply(x) + 1  # break

    return fn, (torch.ones(3, requires_grad=True),)
