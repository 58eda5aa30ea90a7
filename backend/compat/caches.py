"""The caches of compiled graphs: where they are, what they were asked for, and whether they answered."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

#: What is told the keys of the compile under way, and says whether the cache is to answer.
_TOLD: ContextVar[Callable[[str], bool] | None] = ContextVar("optpass_autograd_cache_keys", default=None)


def cache_counters() -> dict[str, int]:
    """Hits, misses and bypasses so far of AOTAutogradCache and FxGraphCache in this process."""
    from torch._dynamo.utils import counters

    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_bypass")
    found = {name: counters["aot_autograd"][name] for name in names}
    fx_names = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass")
    return found | {name: counters["inductor"][name] for name in fx_names}


def inductor_cache_dir() -> str:
    """Inductor's cache folder, by `TORCHINDUCTOR_CACHE_DIR`."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def keeps_compiled_whole() -> bool:
    """Whether AOTAutograd's cache keeps what Inductor has compiled itself, and takes nothing else from it."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as config

    return bool(getattr(config, "bundled_autograd_cache", False) or getattr(dynamo, "caching_precompile", False))


@contextlib.contextmanager
def autograd_cache_keys(wanted: Callable[[str], bool]) -> Iterator[list[str]]:
    """The keys that AOTAutograd's cache is asked for; none where it is not asked, or torch names them otherwise.

    Args:
        wanted: whether the cache is to answer for a key; where not, it is not asked, and keeps nothing.
    """
    _listen()
    keys: list[str] = []

    def told(key: str) -> bool:
        keys.append(key)
        return wanted(key)

    token = _TOLD.set(told)
    try:
        yield keys
    finally:
        _TOLD.reset(token)


@functools.cache
def _listen() -> None:
    with contextlib.suppress(ImportError, AttributeError):
        cache = importlib.import_module("torch._functorch._aot_autograd.autograd_cache")
        original, bypass = cache.autograd_cache_key, cache.BypassAOTAutogradCache

        @functools.wraps(original)
        def telling(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            told = _TOLD.get()
            if told is not None and not told(str(found[0])):
                raise bypass("optpass plans this graph anew")
            return found

        cache.autograd_cache_key = telling  # type: ignore[attr-defined]
