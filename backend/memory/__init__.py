"""The memory budget's contact with AOTAutograd and Inductor: the partitioner, and the replay that finds true peaks.

What a compile goes through: `attach` gives it a partitioner with the `budget` that `step` makes of what is there
beside the graph (`optimizing`, `caller`, `apart`); `partition` makes the search's problem of the `joint` graph, and
`choose` carries out plans of the search until the `replay` of one fits (`graph_run` and `wrapper`, by the inner
compiler). What a step goes through: `planned` runs the graphs, `runs` and `look` see what is held beside them
(`eager_part` for the code that is not compiled), and `together` plans all graphs anew where they do not fit (`allot`).
`kept` keeps plans beside the inner compiler's caches, `measure` tells what was really allocated.
"""
