"""Code around compiled graphs that is not compiled: a loss, what functions hold in variables.

`part` makes a `timeline` of the autograd nodes between graphs, with what each needs `inside`, or by its `scratch`;
`held` is what such nodes hold while a step runs, `caller` what the function holds that runs it.
"""
