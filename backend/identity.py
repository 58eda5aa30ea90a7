"""Cache identity: a digest of everything of ours that can change what Inductor compiles.

Inductor's FxGraphCache and AOTAutogradCache key on what `uuid()` of our hooks returns. A digest that stays equal
while behaviour changes is a silent wrong result; one that changes for nothing recompiles in every process.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from optpass import __version__
from optpass.options import Options
from optpass.passes.contract import Pass


@functools.cache
def source_digest() -> str:
    """SHA-256 of the source of every module of passes and backend, in a fixed order. Read once a process."""
    import optpass.backend
    import optpass.passes

    digest = hashlib.sha256(__version__.encode())
    for package in (optpass.passes, optpass.backend):
        root = Path(package.__path__[0])
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def identity(options: Options, passes: list[Pass], device_fingerprint: str) -> str:
    """The digest for one `torch.compile` call.

    Covers the sources, the options except `report` and `audit` (what is told says nothing about what is compiled), the
    passes that will run with their configuration, and the spec of the device they decide for.
    """
    settings = _plain({key: value for key, value in options.to_json().items() if key not in ("report", "audit")})
    parts = {
        "source": source_digest(),
        "options": settings,
        "passes": [[type(p).__qualname__, p.name, _plain(p.config)] for p in passes],
        "device": device_fingerprint,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _plain(config: Any) -> Any:
    """The configuration as data whose text is the same in every process: sets in order, dataclasses as dicts."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {str(key): _plain(value) for key, value in config.items()}
    if isinstance(config, (set, frozenset)):
        return sorted((_plain(item) for item in config), key=repr)
    if isinstance(config, (list, tuple)):
        return [_plain(item) for item in config]
    return config
