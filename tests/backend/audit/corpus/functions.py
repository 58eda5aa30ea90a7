"""Functions, generators, exceptions and imports. `test_corpus.py` says how programs are written."""

# ruff: noqa: E731, F401, F841, SIM105
# Written the way users write, faults included.

import torch


def raise_uncaught():
    """GB0088"""

    def fn(x):
        y = x + 1
        if x.shape[0] == 3:
            raise ValueError("three")  # break
        return y

    return fn, (torch.ones(3),)


def import_failure():
    """GB0069"""

    def fn(x):
        try:
            import no_such_module_here  # break
        except ImportError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def undefined_name():
    """GB0354"""

    def fn(x):
        try:
            return x + no_such_name_here  # break
        except NameError:
            return x

    return fn, (torch.ones(3),)


def except_not_type():
    """GB0050"""

    def fn(x, kind):
        try:
            raise ValueError
        except kind:  # break
            return x + 1

    return fn, (torch.ones(3), [ValueError])


def exception_attribute():
    """GB0135"""

    def fn(x):
        e = ValueError("a")
        e.note = "more"  # break
        return x + 1

    return fn, (torch.ones(3),)


def exception_keyword():
    """GB0273"""

    def fn(x):
        try:
            raise ImportError("a", name="b")  # break
        except ImportError:
            return x + 1

    def fixed(x):
        try:
            raise ImportError("a")
        except ImportError:
            return x + 1

    return fn, (torch.ones(3),), {"fixed": fixed}


def traceback_lasti():
    """GB9625"""

    def fn(x):
        try:
            raise ValueError
        except ValueError as e:
            last = e.__traceback__.tb_lasti  # break
        return x + 1

    return fn, (torch.ones(3),)


def bind_arguments():
    """GB7312"""

    def helper(a, b):
        return a + b

    def fn(x):
        try:
            return helper(x)  # break
        except TypeError:
            return x

    return fn, (torch.ones(3),)


def function_get():
    """GB9277"""

    def helper(self):
        return 1

    def fn(x):
        try:
            m = type(helper).__get__(helper)  # break
        except TypeError:
            pass
        return x + 1

    return fn, (torch.ones(3),)


def uninitialized_cell():
    """GB0091"""

    def fn(x):
        def inner():
            return later + 1

        y = x + 1
        try:
            y = y + inner()  # break
        except NameError:
            pass
        later = 3
        return y

    return fn, (torch.ones(3),)


def return_function():
    """GB0092"""

    def fn(x):
        return x + 1, torch.nn.modules.utils._ntuple(2)  # break

    return fn, (torch.ones(3),)


def repr_nested():
    """GB1584"""

    def fn(x):
        y = x + 1

        def inner():
            return y

        return x + len(repr(inner))  # break

    return fn, (torch.ones(3),)


def nested_disable():
    """GB0059"""

    def deep(x):
        print("deep")  # break
        return x + 1

    def middle(x):
        return deep(x * 2) + 1

    def fn(x):
        return middle(x + 1) * 2

    return fn, (torch.ones(3),)


def in_generator():
    """GB0059"""

    def values(x):
        for i in range(2):
            print("value")  # break
            yield x + i

    def fn(x):
        total = x
        for v in values(x):
            total = total + v
        return total

    return fn, (torch.ones(3),)


def in_lambda():
    """GB0059"""

    def fn(x):
        f = lambda t: (print("lambda"), t + 1)[1]  # break
        return f(x * 2)

    def fixed(x):
        f = lambda t: t + 1
        return f(x * 2)

    return fn, (torch.ones(3),), {"fixed": fixed}


def in_comprehension():
    """GB0059"""

    def fn(x):
        items = [print(i) or i for i in range(2)]  # break
        return x + sum(items)

    return fn, (torch.ones(3),)
