"""The graphs of one step planned together, once a step has been seen.

`together` plans them, by the `figures` of each; `words` says so in the log and the report, and where no plans fit.
"""
