"""Planning memory: which values of a joint graph to save, which to recompute and when, for a peak in bytes."""
