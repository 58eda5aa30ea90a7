"""Roofline analysis: FLOPs, bytes before and after fusion, bounds and predicted times of a graph's ops."""
