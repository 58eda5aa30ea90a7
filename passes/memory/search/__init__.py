"""The search for plans: one fixed way from nothing recomputed down to the floor, which every budget cuts at its place.

`search` takes the way, by a `move` at a time of those that `moves` finds, and `refill` goes back up from small
states. `schedule` makes a `timeline` of the decisions, with `fused` kernels and the `sequence` of the backward.
`classes` finds repeated layers, and `known` remembers what equal problems came to.
"""
