"""The mechanical rewrites, one file per topic. What they share is in the package above."""
