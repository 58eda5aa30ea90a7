"""Private names that `backend/compat/` uses are in the torch that is installed; what reads them sees what is not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def names() -> ModuleType:
    """`torch_names.py` beside this file."""
    path = Path(__file__).with_name("torch_names.py")
    spec = importlib.util.spec_from_file_location("optpass_test_torch_names", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SITE = Path(torch.__file__).parents[1]


def test_the_installed_torch_has_all_that_is_needed(names: ModuleType) -> None:
    found = names.Torch(SITE)
    assert found.version == torch.__version__
    assert not {use: text for use, text in found.problems(names.uses()).items() if not use.optional}
    assert len({use.name for use in names.uses()}) > 100
    assert any(use.parameters for use in names.uses()) and any(use.call for use in names.uses())


def test_as_a_command() -> None:
    script = Path(__file__).with_name("torch_names.py")
    done = subprocess.run([sys.executable, str(script), str(SITE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith(f"torch {torch.__version__}: ")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Files that use torch in each of the ways that are read."""
    folder = tmp_path / "compat"
    folder.mkdir()
    (folder / "one.py").write_text(
        textwrap.dedent("""
        import torch._a.b as module
        from torch._a import b, c
        from torch import _a as alias
        from torch.nn import functional  # public

        try:
            from torch._a.gone import something
        except ImportError:
            something = None

        POINT = HookPoint("torch._a.b", "Class.method", ("self", "x"), "is lost")

        def use():
            from torch._a.b import function
            mock.patch.object(b.Class, "patched", None)
            getattr(b, "optional", None)
            return module.value, alias.c.value, function(1, key=2), b.Class.inherited
    """)
    )
    return folder


OLD = """
import os
from torch._a.c import value
class Base:
    def inherited(self): ...
class Class(Base):
    patched = 1
    def method(self, before, x): ...
    def other(self): ...
if os.name:
    def function(a, *, key): ...
"""
NEW = """
class Base: ...
class Class(Base):
    def method(self, y): ...
def function(a, *, another): ...
"""


def tree(folder: Path, text: str) -> Path:
    inside = folder / "torch" / "_a"
    inside.mkdir(parents=True)
    (inside / "__init__.py").write_text("")
    (inside / "c.py").write_text("value = 1\n")
    (inside / "b.py").write_text(text)
    (folder / "torch" / "__init__.py").write_text("from torch import _a\n")
    (folder / "torch" / "version.py").write_text("__version__ = '9.9'\n")
    return folder


def test_a_tree_that_has_everything(names: ModuleType, ours: Path, tmp_path: Path) -> None:
    problems = names.Torch(tree(tmp_path / "old", OLD)).problems(names.uses(ours))
    assert {(use.name, use.optional) for use in problems} == {
        ("torch._a.gone.something", True),
        ("torch._a.b.optional", True),
    }


def test_a_tree_that_lacks_something(names: ModuleType, ours: Path, tmp_path: Path) -> None:
    problems = names.Torch(tree(tmp_path / "new", NEW)).problems(names.uses(ours))
    needed = {use.name: text for use, text in problems.items() if not use.optional}
    assert needed == {
        "torch._a.b.Class.method": "takes (self, y)",
        "torch._a.b.Class.patched": "gone",
        "torch._a.b.Class.inherited": "gone",
        "torch._a.b.function": "takes (a, another)",
        "torch._a.b.value": "gone",
    }
