"""The backend function as `torch.compile` calls it: found by name, its arguments, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optpass.backend import compat, entry
from optpass.backend.reporting import build_report
from optpass.errors import ConfigError, OptPassError


def f(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x.t().t()) * 2


def ours(error: BaseException) -> str:
    """The message of the optpass error that Dynamo wrapped."""
    inner = getattr(error, "inner_exception", error)
    assert isinstance(inner, OptPassError), repr(inner)
    assert "\n" not in str(inner)
    return str(inner)


def refused(**compile_args: Any) -> str:
    with pytest.raises(Exception) as caught:  # Dynamo's wrapper around ours
        torch.compile(f, backend="optpass", **compile_args)(torch.ones(2, 2))
    return ours(caught.value)


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would reach Inductor, in place of Inductor."""
    given: list[dict[str, Any]] = []

    def stand_in(
        gm: Any, inputs: Any, config_patches: dict[str, Any], on_compiled: Any, lowered: Any
    ) -> Callable[..., Any]:
        given.append(config_patches)
        with compat.inductor_config().patch(config_patches):  # a setting that does not exist would raise here
            pass
        return gm.forward

    monkeypatch.setattr(compat, "compile_fx", stand_in)
    return given


def test_found_by_name() -> None:
    assert "optpass" in torch._dynamo.list_backends()
    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(f, backend="optpass", options={"inner": "eager"})(x), f(x))
    assert torch._dynamo.backends.registry.lookup_backend("optpass") is entry.optpass


def test_hooks_of_this_torch() -> None:
    assert compat.self_test() == []


def test_arguments_of_later_versions_are_accepted() -> None:
    gms: list[Any] = []
    x = torch.randn(3, 4)

    def capture(gm: Any, inputs: Any) -> Any:
        gms.append((gm, inputs))
        return entry.optpass(gm, inputs, options={"inner": "eager"}, name="a region", more=1)

    assert torch.equal(torch.compile(f, backend=capture)(x), f(x))
    assert len(gms) == 1


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_mode_reaches_inductor(mode: str, inductor: list[dict[str, Any]]) -> None:
    torch.compile(f, backend="optpass", mode=mode)(torch.ones(2, 2))
    wanted = torch._inductor.list_mode_options(mode)
    assert wanted and {k: inductor[0][k] for k in wanted} == wanted
    assert build_report().warnings == []


def test_mode_default(inductor: list[dict[str, Any]]) -> None:
    torch.compile(f, backend="optpass", mode="default")(torch.ones(2, 2))
    assert set(inductor[0]) == {"joint_custom_post_pass", "custom_partitioner_fn"}


def test_patches_reach_inductor(inductor: list[dict[str, Any]]) -> None:
    options = {"inductor": {"max_autotune": True, "triton.cudagraphs": False, "epilogue-fusion": False}}
    torch.compile(f, backend="optpass", options=options)(torch.ones(2, 2))
    assert inductor[0]["max_autotune"] is True and inductor[0]["triton.cudagraphs"] is False
    assert inductor[0]["epilogue_fusion"] is False


def test_what_has_no_effect_is_said() -> None:
    torch.compile(f, backend="optpass", options={"inner": "eager", "inductor": {"max_autotune": True}})(
        torch.ones(2, 2)
    )
    (warning,) = build_report().warnings
    assert "the option 'inductor' has no effect with inner='eager'" in warning


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_guard_filter_goes_along_with_options(inner: str) -> None:
    seen: list[int] = []

    def keep(entries: Any) -> list[bool]:
        seen.append(len(entries))
        return [True] * len(entries)

    step = torch.compile(f, backend="optpass", options={"guard_filter_fn": keep, "inner": inner})
    x = torch.randn(3, 4)
    assert torch.equal(step(x), f(x))
    assert seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iner": "eager"}, "options: unknown option 'iner' (= 'eager'); did you mean 'inner'"),
        ({"inner": "inductr"}, "options: inner='inductr': no such backend; did you mean 'inductor'?"),
        ({"inner": "optpass"}, "options: inner='optpass': no such backend; "),
        ({"disable_passes": ["redundent"]}, "options: disable_passes: no pass is called 'redundent'; did you mean "),
        ({"inductor": {"max_autotun": 1}}, "options: inductor: no setting 'max_autotun' (= 1); did you mean "),
        ({"strict": "yes"}, "options: strict='yes' (str) is not a boolean"),
        ({"device": "h2000", "inner": "eager"}, "options: device='h2000': no device 'h2000' in the table; nearest: "),
        ({"report": "r.txt"}, "options: report='r.txt': write a path that ends in .json or .html"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    assert refused(options=options).startswith(message)


def test_variables_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value, message in (
        ("OPTPASS_INNER", "inductr", "environment: OPTPASS_INNER='inductr': no such backend; did you mean"),
        ("OPTPASS_DEVICE", "h2000", "environment: OPTPASS_DEVICE='h2000': no device"),
        ("OPTPASS_DISABLE_PASSES", "x", "environment: OPTPASS_DISABLE_PASSES: no pass is called 'x'; valid: redundant"),
        ("OPTPASS_REPORT", "x.txt", "environment: OPTPASS_REPORT='x.txt': write a path"),
        ("OPTPASS_INDUCTOR", "{ x = 1 }", "environment: OPTPASS_INDUCTOR: no setting 'x' (= 1); "),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            torch._dynamo.reset()
            assert refused().startswith(message)
    (tmp_path / "optpass.toml").write_text("inner = 'inductr'\n")
    torch._dynamo.reset()
    assert refused().startswith(f"{tmp_path / 'optpass.toml'}: inner='inductr': no such backend")


def test_a_toml_file_is_used(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.optpass]\ninner = 'eager'\ndisable_passes = ['redundant']\n")
    torch.compile(f, backend="optpass")(torch.ones(2, 2))
    report = build_report()
    assert report.graphs[0].inner == "eager" and "redundant" not in [p.name for p in report.graphs[0].passes]
    assert report.options["disable_passes"] == ["redundant"]


def test_an_unknown_mode_is_refused() -> None:
    gm = torch.fx.symbolic_trace(f)
    with pytest.raises(ConfigError, match="mode='max-autotun': no such mode; did you mean 'max-autotune'"):
        entry.optpass(gm, [torch.ones(2, 2)], mode="max-autotun")


def test_nothing_is_filed_for_a_refused_compile() -> None:
    refused(options={"report": "r.txt", "inner": "eager"})
    assert build_report().graphs == []


def test_an_unknown_device_under_us_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is in no table must not stop the user's run; the report says why it has no roofline."""
    from optpass.backend import device

    def unknown(name: str) -> Any:
        raise ConfigError(f"no device {name!r} in the table")

    monkeypatch.setattr(device, "named", unknown)
    x = torch.randn(3, 4)
    assert torch.equal(torch.compile(f, backend="optpass", options={"inner": "eager"})(x), f(x))
    report = build_report()
    said = [*report.warnings, *(p.error or "" for p in report.graphs[0].passes)]
    assert any("no device 'cpu' in the table" in text for text in said), said


@pytest.mark.parametrize("dynamic", [True, None, False])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_dynamic_shapes_recompile_no_more_than_the_inner_compiler_alone(inner: str, dynamic: bool | None) -> None:
    def g(x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1).transpose(0, 1).double().float()
        return y.reshape(-1, x.shape[-1]) @ y.reshape(-1, x.shape[-1]).t()

    def compiles(backend: str, options: dict[str, Any] | None) -> list[int]:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend) if options is None else None
        step = torch.compile(g, backend=counter or backend, dynamic=dynamic, options=options)
        counts = []
        for n in (4, 5, 9, 9, 33):
            x = torch.randn(n, 3, 21)
            torch.testing.assert_close(step(x), g(x))
            counts.append(counter.frame_count if counter else len(build_report().graphs))
        return counts

    assert compiles("optpass", {"inner": inner, "strict": True}) == compiles(inner, None)
    assert build_report().graphs[-1].dynamic is (dynamic is not False)


def test_mark_dynamic_holds() -> None:
    step = torch.compile(f, backend="optpass", options={"inner": "aot_eager"})
    for n in (3, 4, 8, 100):
        x = torch.randn(n, 5)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(step(x), f(x))
    (graph,) = build_report().graphs
    assert graph.dynamic


def test_fullgraph_and_names_of_graphs() -> None:
    torch.compile(f, backend="optpass", fullgraph=True, options={"inner": "eager"})(torch.ones(2, 2))
    (graph,) = build_report().graphs
    assert graph.function.startswith("[0/0] ") and "test_entry.py:" in graph.function


def test_an_optimizer_of_no_table_is_refused_without_a_budget_too() -> None:
    said = "options: optimizer='adamx': no such optimizer; did you mean 'adamax'"
    assert refused(options={"optimizer": "adamx", "inner": "eager"}).startswith(said)
