"""The peak of a training step before it runs, on fake tensors.

`replay` runs a step: its graphs by `graph_run`, or by `wrapper` what Inductor generated for them, with what only data
says `decided` ahead; `alone` runs one graph. `graph_values` are their inputs, `tail` is what happens between forward
and backward, and `storages` counts.
"""
