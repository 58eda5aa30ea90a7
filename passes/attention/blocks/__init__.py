"""The operator of our own for CPUs: attention on blocks of scores that stay in cache.

`operator` is `torch.ops.optpass.attention_in_blocks` and its backward; `regions` cuts it, `products` multiplies,
`draws` says what dropout drops, and `team` shares it out among threads.
"""
