"""Bytes that operators allocate and release inside themselves.

`workspace` is the door; formulas are in `elementwise` and `library`, read from a `call`; `asked` says which
operators are run to know; `bodies` is for operators with graphs inside.
"""
