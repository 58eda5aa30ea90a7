"""What a graph computes: its nodes run once on fake tensors, as a program of ATen operations that nothing writes to.

`lower` makes the program (`ir`) of what `recorder` sees; `calls` says what one operation is, `nodes` what a node is,
`reach` which nodes can have to do with an attention.
What is written to in part becomes operations on the whole: `part_writes` finds the part, `part_values` the
operations.
"""
