"""Finding attention in a program, and reading it into the normal form in `site`.

`core` finds the two products and the softmax between them: `walk` goes from the second product up to the softmax,
whose spellings are in `softmaxes` (`division`: one that is finished behind the product; `sinks`, `zeros`: what else
is done to weights), and `scores` reads the chain from there to the first product: `sums` what is added, `factors`
what it is multiplied by, `fills` what is replaced, `joined`, `pieces` and `picks` several products as one and parts
of one, `elements` products written by elements. `terms` keeps what is known of the size of what is added. `operands`
has what all sides share. `unseen` names what none of them understands.
"""
