"""From a site to the one call that computes it.

`plan` decides it: `frame` which axes are the dims of the call, `masking` how what `masks` proves of a mask reaches a
kernel, `needless` which masks hide nothing, `empty` what becomes of rows that are left without a key.
"""
