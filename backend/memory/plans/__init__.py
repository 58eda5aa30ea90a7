"""Plans of the graphs of a step, compared.

`bounds` says what they come to, `allot` which of them make the step fit; `searches` keeps what was found before.
"""
