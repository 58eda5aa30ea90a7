"""Functions of torch called in ways that Dynamo does not trace. `test_corpus.py` says how programs are written."""

# ruff: noqa: BLE001, SIM105
# Written the way users write, faults included.

import torch


def out_dtype():
    """GB0336"""

    def fn(x):
        return torch.ops.higher_order.out_dtype(torch.ops.aten.add.Tensor, torch.int32, x, other=x)  # break

    return fn, (torch.ones(3, dtype=torch.int8),)


def set_grad_keyword():
    """GB0330"""

    def fn(x):
        return torch.ops.higher_order.wrap_with_set_grad_enabled(True, lambda t: t + 1, x, scale=1)  # break

    return fn, (torch.ones(3),)


def set_grad_flag():
    """GB0331"""

    def fn(x):
        return torch.ops.higher_order.wrap_with_set_grad_enabled(x.sum() > 0, lambda t: t + 1, x)  # break

    return fn, (torch.ones(3),)


def set_grad_free():
    """GB0332"""

    def fn(x, y):
        z = y + 1
        return torch.ops.higher_order.wrap_with_set_grad_enabled(True, lambda t: t + z, x)  # break

    return fn, (torch.ones(3), torch.ones(3))


def autocast_keyword():
    """GB0333"""

    def fn(x):
        return torch.ops.higher_order.wrap_with_autocast("cpu", None, True, None, lambda t: t + 1, x, a=1)  # break

    return fn, (torch.ones(3),)


def autocast_constant():
    """GB0344"""

    def fn(x):
        return torch.ops.higher_order.wrap_with_autocast("cpu", None, x.sum() > 0, None, lambda t: t + 1, x)  # break

    return fn, (torch.ones(3),)


def autocast_free():
    """GB0334"""

    def fn(x, y):
        z = y + 1
        return torch.ops.higher_order.wrap_with_autocast("cpu", None, True, None, lambda t: t + z, x)  # break

    return fn, (torch.ones(3), torch.ones(3))


def invoke_subgraph():
    """GB0017"""

    def fn(x):
        return torch._higher_order_ops.invoke_subgraph(lambda t: t + 1, None, x)  # break

    return fn, (torch.ones(3),)


def check_message():
    """GB9840"""
    message = "text".upper

    def fn(x):
        torch._check(x.shape[0] == 3, message)  # break
        return x + 1

    return fn, (torch.ones(3),)


def check_message_closure():
    """GB9158"""

    def fn(x):
        y = x + 1
        torch._check(x.shape[0] == 3, lambda: f"{y}")  # break
        return y

    def fixed(x):
        torch._check(x.shape[0] == 3, lambda: "three")
        return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def device_module_arguments():
    """GB0248"""

    def fn(x):
        try:
            torch.get_device_module("cpu", "cpu")  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def device_module_name():
    """GB0286"""

    def fn(x):
        try:
            torch.get_device_module("nowhere")  # break
        except RuntimeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def stream_arguments():
    """GB0285"""

    def fn(x):
        try:
            torch.accelerator.current_stream("cpu", "cpu")  # break
        except Exception:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def stream_device():
    """GB0249"""

    def fn(x):
        try:
            torch.accelerator.current_stream("nowhere")  # break
        except Exception:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def ntuple():
    """GB0243"""

    def fn(x, obj):
        n = torch.nn.modules.utils._pair(obj)  # break
        return x + len(n)

    return fn, (torch.ones(3), object())


def wrap_triton():
    """GB6735"""

    def fn(x):
        try:
            torch.library.wrap_triton(None, None)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def pop_mode_stack():
    """GB0234"""

    def fn(x):
        try:
            torch._C._pop_torch_function_stack()  # break
        except Exception:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def guard_scalar_of_tensor():
    """GB0360"""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    def fn(x):
        try:
            guard_scalar(x)  # break
        except Exception:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def elementwise_dtypes_argument():
    """GB5195"""
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as K
    from torch._prims_common import elementwise_dtypes

    def fn(x, o):
        try:
            elementwise_dtypes(o, type_promotion_kind=K.DEFAULT)  # break
        except Exception:
            pass
        return x + 1

    return fn, (torch.ones(3), object())
