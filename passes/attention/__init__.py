"""Attention written by hand, found by its structure and computed by one fused kernel.

The way of a graph through this package: `program` makes it a program of ATen operations; `find` finds the attentions
in it, following `axes` through every layout, and reads each into the normal form in `site`; `masks` proves what its
masks are; `plans` decides how one call computes it; `choice` asks `targets` for the kernel and `gate` whether it
pays; `write` puts the call in place of what the user wrote. `blocks` is the operator of our own. `work` takes a graph
this way, site by site, `words` reports, and `attention` is the pass.
"""
