"""The partitioner of a compile that has a memory budget.

`partitioner` makes the search's problem of the `joint` graph (`accumulate` improves it first), and `choose` carries
out plans of the search, in an `order` of kernels that needs less, until the replay of one fits; `outcome` is the plan
that the report shows. `growth` is for sizes that change from call to call, `unbounded` refuses those that nothing
bounds, and `offered` are plans that follow from more than the graph.
"""
