"""Sparse, nested, quantized and subclassed tensors, `out=`, and operators without a fake. `test_corpus.py` says how programs are written."""

# ruff: noqa: E501
# Written the way users write, faults included.

import torch

LIBRARY = torch.library.Library("corpus", "FRAGMENT")
LIBRARY.define("no_fake(Tensor x) -> Tensor")
LIBRARY.impl("no_fake", lambda x: x + 1, "CPU")
LIBRARY.define("name_of(Tensor x) -> str")
LIBRARY.impl("name_of", lambda x: "a", "CompositeExplicitAutograd")
LIBRARY.define("fake_raises(Tensor x) -> Tensor")
LIBRARY.impl("fake_raises", lambda x: x + 1, "CPU")


def _fake_raises(x):
    raise NotImplementedError("nothing")


torch.library.register_fake("corpus::fake_raises", _fake_raises, lib=LIBRARY)


def out_shape():
    """GB0247"""

    def fn(x, out):
        torch.add(x, 1, out=out)  # break
        return out * 2

    def fixed(x, out):
        return (x + 1) * 2

    return fn, (torch.ones(3), torch.empty(0)), {"fixed": fixed}


def out_strides():
    """GB0242"""

    def fn(x, out):
        torch.add(x, 1, out=out)  # break
        return out * 2

    def fixed(x, out):
        out.copy_(x + 1)
        return out * 2

    return fn, (torch.ones(3), torch.ones(6)[::2]), {"fixed": fixed}


def out_list_shape():
    """GB0240"""

    def fn(x, values, indices):
        torch.sort(x, out=(values, indices))  # break
        return values * 2

    def fixed(x, values, indices):
        return torch.sort(x).values * 2

    return fn, (torch.ones(3), torch.empty(0), torch.empty(0, dtype=torch.int64)), {"fixed": fixed}


def created_requires_grad():
    """GB0225"""

    def fn(x):
        w = torch.ones(3, requires_grad=True)  # break
        return x * w

    return fn, (torch.ones(3),)


def sparse_input():
    """GB0015"""

    def fn(x):
        return x * 2  # break

    return fn, (torch.ones(3).to_sparse(),)


def sparse_result():
    """GB0277"""

    def fn(x):
        y = x + 1
        return y.to_sparse()  # break

    return fn, (torch.ones(3),)


def sparse_csr_creation():
    """GB0374"""

    def fn(x):
        return torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), x[:1])  # break

    return fn, (torch.ones(3),)


def strided_nested_input():
    """GB0016"""

    def fn(x):
        return x * 2  # break

    return fn, (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),)


def strided_nested():
    """GB0233"""

    def fn(x):
        return torch.nested.nested_tensor([x, x], layout=torch.strided)  # break

    return fn, (torch.ones(3),)


def nested_of_tensor():
    """GB0245"""

    def fn(x):
        return torch.nested.nested_tensor(x, layout=torch.jagged)  # break

    return fn, (torch.ones(3, 2),)


def tensor_set():
    """GB0222"""

    def fn(tensors):
        out = 0
        for t in tensors:  # break
            out = out + t
        return out

    return fn, ({torch.ones(3)},), {"fixed": fn, "fixed_arguments": ([torch.ones(3)],)}


def type_error():
    """GB0112"""

    def fn(x):
        try:
            return torch.sum(x, dim="a", foo=1)  # break
        except TypeError:
            return x

    return fn, (torch.ones(3),)


def quantized_input():
    """GB0064"""

    def fn(x):
        return x.dequantize()  # break

    def fixed(x):
        return x

    return (
        fn,
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),),
        {"fixed": fixed, "fixed_arguments": (torch.ones(3),)},
    )


def no_fake():
    """GB0090"""

    def fn(x):
        return torch.ops.corpus.no_fake(x)  # break

    return fn, (torch.ones(3),)


def name_of():
    """GB0208"""

    def fn(x):
        s = torch.ops.corpus.name_of(x)  # break
        return x + len(s)

    return fn, (torch.ones(3),)


def fake_raises():
    """GB0087"""

    def fn(x):
        return torch.ops.corpus.fake_raises(x)  # break

    return fn, (torch.ones(3),)


def not_compliant():
    """GB0043"""

    def fn(x):
        return torch.ops.corpus.no_fake(x)  # break

    return fn, (torch.ones(3),), {"config": {"only_allow_pt2_compliant_ops": True}}


def tensor_subclass_attribute():
    """GB0163"""

    class Mine(torch.Tensor):
        pass

    def fn(x):
        return x + 1, x._base  # break

    return fn, (torch.ones(3).as_subclass(Mine),)


def subclass_constructor():
    """GB0026"""

    class Mine(torch.Tensor):
        pass

    def fn(x):
        return Mine(2, 3) * 0 + x.sum()  # break

    return fn, (torch.ones(3),)


def subclass_overrides_attribute():
    """GB0164"""

    class M(torch.Tensor):
        ndim = 5

    def fn(x):
        return x + x.ndim  # break

    return fn, (torch.ones(3).as_subclass(M),)


def torch_function_declines():
    """GB0000"""

    class M(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.sin:
                return NotImplemented
            return super().__torch_function__(func, types, args, kwargs or {})

    def fn(x):
        try:
            return torch.sin(x)  # break
        except TypeError:
            return 1

    return fn, (torch.ones(3).as_subclass(M),)
