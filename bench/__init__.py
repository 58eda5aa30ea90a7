"""Performance claims, one file each, on one harness (`optpass.bench.harness`)."""
