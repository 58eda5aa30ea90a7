"""The memory budget's contact with AOTAutograd and Inductor: the partitioner, and the replay that finds true peaks.

What a compile goes through: `attach` gives it a partitioner with the `budget` that `step` makes of what is there
beside the graph (`optimizing` the optimizer, `idle` what no gradient reaches); `partition` plans, until the `replay`
of a plan fits. What a step goes through: `planned` runs the graphs; `seen` keeps what each held and what was beside
it, `eager` what the code needs that is not compiled; `together` plans all graphs anew where they do not fit, by
`plans` of each. `filing` tells the report, `kept` keeps plans beside the inner compiler's caches, `measure` tells what
was really allocated, `probe` what a library allocates inside itself, and `versions` whether an optimizer has stepped.
"""
