"""Imported first of all by each Python that a test starts (the root `conftest.py` puts this folder into PYTHONPATH).

Most of such a process' time is spent importing torch and its compiler, a fifth of that in the collector, which finds
nothing to collect there.
"""

import gc

gc.set_threshold(20_000, 20, 20)
