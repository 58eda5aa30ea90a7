"""Attention written by hand, found by its structure and computed by one fused kernel.

The way of a graph through this package: `lower` makes it a program of ATen operations (`ir`); `core` finds the two
products and the softmax between them, following `axes` through every layout: `walk` goes from the second product up to
the softmax, whose spellings are in `softmaxes`; `scores` reads the chain to the first product into the normal form in
`site`; `masks` proves what a mask is; `plan` decides how one call computes it; `targets` says which kernel, `gate`
whether it pays; `rewrite` writes the call with `emit`, `swap` puts it in place; `words` reports.
"""
