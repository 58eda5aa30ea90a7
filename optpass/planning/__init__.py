"""Planning a training step ahead of time: what would be saved, what recomputed, and what it would cost."""
