"""Attention written by hand, found by its structure and computed by one fused kernel.

The way of a graph through this package: `lower` makes it a program of ATen operations (`ir`); `core` finds the two
products and the softmax between them, following `axes` through every layout: `walk` goes from the second product up to
the softmax, whose spellings are in `softmaxes`; `scores` reads the chain to the first product into the normal form in
`site` (`sums` what is added, `fills` what is replaced, `joined` and `pieces` several products as one); `masks` proves
what a mask is, `masking` how it reaches a kernel, `empty` what becomes of rows that it leaves without a key; `plan`
decides how one call computes the site; `choice` asks `targets` for the kernel and `gate` whether it pays; `rewrite`
writes the call with `emit`, its mask with `mask_operand`, and `rows` what kernels do otherwise in rows without a key;
`twice` gives it second derivatives; `swap` puts it in place, `returned` in memory of its own; `words` reports. `unseen`
names what none of them understands; `zeros` reads weights that are set to zero. The operator of our own is in `blocks`,
cut by `regions`, multiplied by `products`, shared out by `team`.
"""
