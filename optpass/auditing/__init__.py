"""Auditing a run: the context manager, the script runner, fixes and their verification, the pytest plugin."""
