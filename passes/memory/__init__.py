"""Planning memory: which values of a joint graph to save, which to recompute and when, for a peak in bytes.

`problem` is a training step as the `search` sees it, with the `storage` behind each value, what may run twice
(`purity`), and times and workspaces from `pricing`; a `plan` is what it finds, and `emit` carries it out. `describe`
reads a ledger off a timeline, `infeasible` says what would help where no plan fits, and `offload` what could go to
host memory. `workspace` knows what operators allocate inside themselves, `optimizers` what an optimizer keeps and
needs.
"""
