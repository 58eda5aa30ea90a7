"""The report: its model (`model`), how it is collected and written (`store`), and its views (`terminal`, `html`).

Nothing here may import torch, `optpass.passes` or `optpass.backend`: they file records, the report only holds them.
"""
