"""What was seen of compiled graphs with a budget in the steps in which they ran.

`runs` says which graphs run in a step (`chains`), from each `run`: by a `look` beside it and a `watch` of the eager
part of a backward. `leaves` keeps it by graph, in each `situation`, and its `share` of the budget from then on;
`stores` are storages, weakly. `expected` is what this says of graphs that have not run, `apart` of modules that wait
for their first call; `ungraded` are graphs that run without gradients, `eager_ahead` is what eager code makes of their
results before a step, `late` are gradients that are cleared behind a forward. `held_by_caller` tells what variables
hold.
"""
