"""Values and shapes that only the data decides. `test_corpus.py` says how programs are written."""

# Written the way users write, faults included.

import torch
import torch.nn.functional as F


def branch():
    """GB0170"""

    def fn(x):
        y = x * 2
        if y.sum() > 0:  # break
            return y + 1
        return y - 1

    def fixed(x):
        y = x * 2
        return torch.where(y.sum() > 0, y + 1, y - 1)

    return fn, (torch.ones(4),), {"fixed": fixed}


def loop_on_tensor():
    """GB0170"""

    def fn(x):
        while x.sum() < 100:  # break
            x = x * 2
        return x

    return fn, (torch.ones(4),)


def not_on_tensor():
    """GB0170"""

    def fn(x):
        y = x.cos()
        z = y if not (x > 3).any() else y * 2  # break
        return z.sin()

    def fixed(x):
        y = x.cos()
        return torch.where((x > 3).any(), y * 2, y).sin()

    return fn, (torch.ones(4),), {"fixed": fixed}


def item():
    """GB0124"""

    def fn(x):
        scale = x.max().item()  # break
        return x / scale

    def fixed(x):
        return x / x.max()

    return fn, (torch.arange(1.0, 5.0),), {"fixed": fixed}


def float_of_tensor():
    """GB0124"""

    def fn(x):
        y = x.sum()
        return x * float(y)  # break

    def fixed(x):
        return x * x.sum()

    return fn, (torch.arange(1.0, 5.0),), {"fixed": fixed}


def tolist():
    """GB0109"""

    def fn(x):
        return [v + 1 for v in x.tolist()]  # break

    return fn, (torch.arange(1.0, 5.0),)


def boolean_index():
    """GB0036"""

    def fn(x):
        y = x.sin()
        return y[y > 0].sum()  # break

    def fixed(x):
        y = x.sin()
        return torch.where(y > 0, y, 0.0).sum()

    return fn, (torch.arange(-4.0, 4.0),), {"fixed": fixed}


def nonzero():
    """GB0036"""

    def fn(x):
        y = x + 1
        return torch.nonzero(y)  # break

    return fn, (torch.arange(4.0),), {"fixed": fn, "fixed_config": {"capture_dynamic_output_shape_ops": True}}


def unique():
    """GB0036"""

    def fn(x):
        return torch.unique(x * 2)  # break

    return fn, (torch.arange(4.0),)


def equal():
    """GB0033"""

    def fn(x, y):
        return torch.equal(x, y), x + y  # break

    return fn, (torch.ones(3), torch.ones(3))


def least_squares():
    """GB0037"""

    def fn(a, b):
        return torch.linalg.lstsq(a, b).solution  # break

    return fn, (torch.rand(4, 4), torch.rand(4, 4)), {"config": {"capture_dynamic_output_shape_ops": True}}


def one_hot():
    """GB0246"""

    def fn(labels):
        return F.one_hot(labels).float()  # break

    def fixed(labels):
        return F.one_hot(labels, num_classes=3).float()

    return fn, (torch.tensor([0, 2, 1]),), {"fixed": fixed}


def size_from_unbacked():
    """GB0170"""

    def fn(x):
        n = x.sum().item()
        if n > 3:  # break
            return x + 1
        return x - 1

    def fixed(x):
        return torch.where(x.sum() > 3, x + 1, x - 1)

    return fn, (torch.tensor([2, 3]),), {"config": {"capture_scalar_outputs": True}, "fixed": fixed}


def sort_tensors():
    """GB0207"""

    def fn(items):
        return sorted(items)[0] + 1  # break

    def fixed(items):
        return torch.stack(items).sort().values[0] + 1

    return fn, ([torch.tensor(3.0), torch.tensor(1.0), torch.tensor(2.0)],), {"fixed": fixed}


def range_of_tensor():
    """GB0124"""

    def fn(x, n):
        for _ in range(n.item()):  # break
            x = x * 2
        return x

    def fixed(x, n):
        for _ in range(n):
            x = x * 2
        return x

    return fn, (torch.ones(3), torch.tensor(3)), {"fixed": fixed, "fixed_arguments": (torch.ones(3), 3)}


def int_index():
    """GB0124"""

    def fn(x, table):
        return table[int(x.argmax())] * x  # break

    def fixed(x, table):
        return torch.index_select(table, 0, x.argmax().reshape(1)) * x

    return (
        fn,
        (torch.ones(3), [1.0, 2.0, 3.0]),
        {"fixed": fixed, "fixed_arguments": (torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))},
    )


def size_index():
    """GB0124"""

    def fn(x, i):
        return x.shape[i] * x  # break

    return fn, (torch.ones(3, 2), torch.tensor(0))


def list_compare():
    """GB6622"""

    def fn(x, y):
        if [x, 1] == [y, 1]:  # break
            return x + 1
        return x

    return fn, (torch.tensor(1.0), torch.tensor(1.0))


def assert_in_helper():
    """GB0034"""

    def helper(x):
        assert x.shape[0] == 4, "four"  # break
        return x

    def fn(x):
        try:
            return helper(x)
        except AssertionError:
            return x + 1

    return fn, (torch.ones(3),)


def assert_message():
    """GB0171"""

    def fn(x):
        try:
            assert x.shape[0] == 4, [x]  # break
        except AssertionError:
            return x + 1
        return x

    return fn, (torch.ones(3),)


def assertion_error_argument():
    """GB0171"""

    def fn(x):
        try:
            raise AssertionError(3)  # break
        except AssertionError:
            return x + 1

    return fn, (torch.ones(3),)
