"""Writing the call of a plan into the graph, in the place of what the user wrote.

`rewrite` writes it with `emit`, its mask with `mask_operand` or, where no kernel pays, from `positions`; as
FlexAttention with `flex`; under autocast with `uncast`. `exact`, `rows` and `lost` are what kernels do otherwise in
some rows; `preference` tells SDPA which kernel to take, `twice` gives second derivatives, `returned` a result in
memory of its own. `shared` computes once what several sites need. `swap` puts the call in place, and `sweep` removes
what it left.
"""
