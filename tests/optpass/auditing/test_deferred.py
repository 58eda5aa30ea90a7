"""The moment at which recording begins: after the compiler has loaded, before anything compiles."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import sys
from optpass.auditing.deferred import WhenCompilerLoads
calls = []
def ready():
    import optpass.backend.audit.recording as r
    assert not getattr(sys.modules["torch"].__spec__, "_initializing", False)
    calls.append("torch._dynamo" in sys.modules)
hook = WhenCompilerLoads(ready)
hook.install()
assert "torch" not in sys.modules and calls == []
"""
CASES = {
    "a first compile": """
        import torch
        assert calls == [], "torch alone is not the compiler"
        assert type(torch.__spec__.loader).__name__ == type(torch.__loader__).__name__ == "SourceFileLoader"
        torch.compile(lambda x: x)
        assert calls == [True] and hook not in sys.meta_path
    """,
    "while optpass itself loads": """
        import torch
        import optpass.backend.audit.recording
        torch.compile(lambda x: x, backend="eager")(torch.ones(1))
        assert calls == [True]
    """,
    "an import that fails": """
        try:
            import torch.no_such_module
        except ModuleNotFoundError:
            pass
        assert calls == [] and hook in sys.meta_path
        import torch._dynamo
        assert calls == [True]
        other = []
        WhenCompilerLoads(lambda: other.append(1)).install()
        assert other == [1], "loaded already: at once"
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_begins_once(name: str) -> None:
    text = PRELUDE + textwrap.dedent(CASES[name])
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
