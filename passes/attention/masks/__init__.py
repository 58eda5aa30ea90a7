"""What a mask is, proved from the operations and the contents that it is made of.

`Prover` is the door: facts about masks, and numbers that tensors provably are. Inside: integer forms (`integers`),
propositions (`predicates`), numbers that depend on them (`pieces`, `numbers`), elements of Values (`elements`, the
`rules_*`), contents of real tensors (`contents`, `evaluate`). Nothing here changes a graph or adds a guard.
"""

from optpass.passes.attention.masks.facts import Kind, MaskFacts, Part
from optpass.passes.attention.masks.prove import Prover

__all__ = ["Kind", "MaskFacts", "Part", "Prover"]
