"""`optpass train`: a small, exact training loop for language models, compiled with `backend="optpass"`.

`config` reads and checks the file, `data` makes tokens and batches, `network` builds the model, `loop` steps it,
`run` ties them together and fills the report. Nothing here prints: that is `optpass.cli.train`.
"""

from __future__ import annotations
