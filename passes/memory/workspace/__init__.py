"""Bytes that operators allocate and release inside themselves.

`workspace` is the door; formulas are in `elementwise` and `library`, read from a `call`; `bodies` is for operators
with graphs inside.
"""
