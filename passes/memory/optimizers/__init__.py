"""What optimizers keep and need.

`optimizers` has them by name and by class, `rehearsal` runs a step on meta tensors, and `search` finds those that a
program has.
"""
