"""The choice of a kernel: the tables against torch's own dispatcher and kernels, and as data where there is no GPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from optpass.errors import ConfigError
from optpass.options import AttentionOptions
from optpass.passes import devices
from optpass.passes.attention import targets
from optpass.passes.attention.problem import MaskKind, Problem
from optpass.passes.attention.targets import arch_of, architectures, choose, conditions, kernels, present, taken, usable
from optpass.passes.attention.targets.choose import MODES
from optpass.passes.attention.targets.conditions import CONDITIONS, Situation
from optpass.passes.attention.targets.kernel import FILES, from_toml, sources

PRESENT = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
ARCHES = [name for group in architectures().values() for name in group.names if group.device == "cuda"]


def problem(**fields: Any) -> Problem:
    base: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "batch": 2, "heads": 8, "queries": 512}
    base |= {"keys": fields.get("queries", 512), "head_dim": 64}
    fields = base | fields
    fields.setdefault("kv_heads", fields["heads"])
    fields.setdefault("value_dim", fields["head_dim"])
    return Problem(**fields)


def gpu(**fields: Any) -> Problem:
    return problem(**({"device": "cuda", "dtype": torch.bfloat16} | fields))


# ---- against torch's dispatcher ------------------------------------------------------------------------------------


def random_problem(rng: random.Random, device: str) -> Problem:
    queries, head_dim, heads = rng.choice([0, 1, 5, 64]), rng.choice([1, 3, 8, 40, 64, 200, 264]), rng.choice([1, 2, 6])
    mask: MaskKind = rng.choice(get_args(MaskKind))
    return problem(
        device=device,
        dtype=rng.choice([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
        batch=rng.choice([1, 3]),
        heads=heads,
        kv_heads=rng.choice([k for k in (1, 2, 3, 6) if heads % k == 0]),
        queries=queries,
        keys=rng.choice([queries, queries, 0, 1, 7, 64]),
        head_dim=head_dim,
        value_dim=rng.choice([head_dim, head_dim, 16]),
        mask=mask,
        mask_grad=mask == "float" and rng.random() < 0.3,
        dropout=rng.choice([0.0, 0.0, 0.0, 0.1, 0.5]),
        training=rng.random() < 0.5,
    )


def choice_of_torch(p: Problem) -> str:
    """What torch's dispatcher says, asked with operands that take no memory."""

    def operand(heads: int, length: int, dim: int) -> torch.Tensor:
        one = torch.empty(max(dim, 1), dtype=p.dtype, device=p.device)
        return one.as_strided((p.batch, heads, length, dim), (0, 0, 0, 1)).detach().requires_grad_(p.training)

    q, k, v = (
        operand(h, n, d)
        for h, n, d in (
            (p.heads, p.queries, p.head_dim), (p.kv_heads, p.keys, p.head_dim), (p.kv_heads, p.keys, p.value_dim),
        )
    )  # fmt: skip
    mask = None
    if p.mask in ("bool", "float"):
        dtype = torch.bool if p.mask == "bool" else p.dtype
        mask = torch.zeros(p.batch, 1, p.queries, p.keys, dtype=dtype, device=p.device).requires_grad_(p.mask_grad)
    found = torch.ops.aten._fused_sdp_choice(
        q, k, v, mask, p.dropout, p.mask == "causal", enable_gqa=p.heads != p.kv_heads
    )
    backend = SDPBackend(found).name
    return next(name for name, kernel in kernels(p.device).items() if kernel.backend == backend)


@pytest.mark.parametrize("device", PRESENT)
def test_taken_is_what_torch_takes(device: str) -> None:
    arch, cudnn = present(device)
    rng = random.Random(random.getrandbits(32))
    seen: dict[str, int] = {}
    for _ in range(1500):
        p = random_problem(rng, device)
        name = taken(p, arch=arch, cudnn=cudnn)
        assert name == choice_of_torch(p), p
        seen[name] = seen.get(name, 0) + 1
    assert min(seen.values()) > 100 and len(seen) > 1, seen


# ---- against the kernels on a CPU ----------------------------------------------------------------------------------


def saved_elements(p: Problem) -> list[int]:
    """Elements of each tensor that SDPA's forward saves for the backward."""
    shapes = ((p.heads, p.queries, p.head_dim), (p.kv_heads, p.keys, p.head_dim), (p.kv_heads, p.keys, p.value_dim))
    q, k, v = (torch.randn(p.batch, *shape, dtype=p.dtype, requires_grad=True) for shape in shapes)
    mask = torch.ones(p.queries, p.keys, dtype=torch.bool).tril(p.keys // 2) if p.mask == "bool" else None
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.scaled_dot_product_attention(
            q, k, v, mask, p.dropout, p.mask == "causal", enable_gqa=p.heads != p.kv_heads
        ).sum()
    return sizes


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": "causal"},
        {"mask": "bool", "kv_heads": 1},
        {"dropout": 0.25},
        {"value_dim": 8},
        {"dtype": torch.bfloat16, "head_dim": 5},
    ],
)
def test_what_materialises_saves_the_scores(fields: dict[str, Any]) -> None:
    p = problem(heads=4, queries=96, keys=96, training=True, **({"head_dim": 16} | fields))
    found = choose(p, arch="cpu", mode="sdpa")
    assert found.target == "sdpa" and found.by_default
    scores = p.batch * p.heads * p.queries * p.keys
    assert found.materialises == (scores in saved_elements(p))


def test_rows_without_keys_are_zero() -> None:
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    keep = torch.rand(6, 6) > 0.3
    keep[2] = False
    added = torch.zeros(6, 6).masked_fill(~keep, -torch.inf)
    for kernel in kernels("cpu").values():
        if kernel.target == "sdpa":
            with sdpa_kernel(getattr(SDPBackend, kernel.backend)):
                for mask in (keep, added):
                    assert kernel.masked_rows == "zeros"
                    assert not F.scaled_dot_product_attention(q, k, v, mask)[:, :, 2].any()


def test_unfused_sdpa_draws_the_stream_of_dropout() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8) for _ in range(3))
    assert [name for name, kernel in kernels("cpu").items() if kernel.same_dropout_stream] == ["math"]
    assert taken(problem(dropout=0.3)) == "math"
    torch.manual_seed(7)
    fused = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(7)
    by_hand = F.dropout((q @ k.mT * 8**-0.5).softmax(-1), 0.3) @ v
    torch.testing.assert_close(fused, by_hand)


def flex(q: Any, k: Any, v: Any) -> Any:
    """Softcap and a sliding window, on grouped heads."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 9), None, None, 40, 40, device="cpu")
    run = torch.compile(
        lambda q, k, v: flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: 5 * torch.tanh(s / 5), block_mask=window, enable_gqa=True
        )
    )
    return run(q, k, v)


@pytest.mark.slow
def test_flex_computes_on_a_cpu_what_the_table_says() -> None:
    p = problem(
        heads=4, kv_heads=2, queries=40, keys=40, head_dim=3, value_dim=5, dtype=torch.float16, mask="bool", window=9,
        score_ops=frozenset({"softcap"}),
    )  # fmt: skip
    available = usable("cpu", compiled=True)
    found = choose(p, arch="cpu", mode="auto", available=available)
    if "flex" not in available:  # no AVX2: then nothing computes a softcap
        assert found.target is None and "FlexAttention cannot be used here" in found.reason
        return
    assert (found.target, found.kernel, found.materialises) == ("flex", "flex", False)
    q = torch.randn(2, 4, 40, 3, dtype=p.dtype)
    k, v = torch.randn(2, 2, 40, 3, dtype=p.dtype), torch.randn(2, 2, 40, 5, dtype=p.dtype)
    with torch.no_grad():
        result = flex(q, k, v)
    scores = 5 * torch.tanh(q.double() @ k.double().repeat_interleave(2, 1).mT * 3**-0.5 / 5)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    reference = scores.masked_fill((distance < 0) | (distance >= 9), -torch.inf).softmax(-1)
    torch.testing.assert_close(
        result.double(), reference @ v.double().repeat_interleave(2, 1), rtol=2e-3, atol=2e-3
    )  # fmt: skip


def test_flex_has_no_backward_on_a_cpu() -> None:
    compiled = choose(problem(training=True), arch="cpu", mode="flex", available=usable("cpu", compiled=True))
    assert "has no backward" in compiled.reason
    unfused = choose(
        problem(training=True), arch="cpu", mode="flex", available=usable("cpu", compiled=True, unfused=True)
    )
    assert unfused.kernel == "flex_unfused" and unfused.materialises
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex(*(torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3)))


# ---- as data -------------------------------------------------------------------------------------------------------

WINDOW = {"mask": "bool", "window": 64}
#: (fields, architecture, cuDNN) -> (kernel, chosen by SDPA itself)
EXPECTED: list[tuple[dict[str, Any], str | None, int | None, str, bool]] = [
    ({"mask": "causal"}, "sm_90", 91600, "cudnn", True),
    ({"mask": "causal"}, "sm_90", 91002, "cudnn", False),  # lengths are multiples of 128, so the old fault is no matter
    ({"mask": "causal", "queries": 500}, "sm_90", 91002, "flash", True),
    ({"mask": "causal", "queries": 500}, "sm_90", None, "flash", True),
    ({"mask": "causal", "queries": 500}, "sm_90", 91600, "cudnn", True),
    ({"mask": "causal", "queries": 500, "keys": 700}, "sm_90", None, "mem_efficient", True),
    ({"mask": "causal", "head_dim": 100}, "sm_90", 91600, "flash", True),
    ({"head_dim": 256}, "sm_90", 91600, "flash", False),
    ({"head_dim": 256}, "sm_90", 92300, "cudnn", True),
    ({"head_dim": 192, "value_dim": 128, "training": True}, "sm_90", 91600, "cudnn", True),
    ({"head_dim": 192, "training": True}, "sm_90", 92300, "flash", False),
    ({"head_dim": 264}, "sm_90", 92300, "mem_efficient", True),
    ({"mask": "bool", "queries": 704, "training": True}, "sm_90", 91600, "mem_efficient", False),
    ({"mask": "bool", "queries": 704}, "sm_90", 91600, "mem_efficient", False),
    ({"mask": "bool", "queries": 768, "training": True}, "sm_90", 91600, "mem_efficient", False),
    ({"dropout": 0.1}, "sm_90", 91600, "flash", False),
    ({"dropout": 0.125}, "sm_90", 91600, "cudnn", True),
    ({"dropout": 0.125}, "sm_90", 91300, "flash", True),
    ({"mask": "bool", "dropout": 0.1, "kv_heads": 2}, "sm_90", 91600, "math", False),
    (WINDOW, "sm_90", 91600, "flex", False),
    (WINDOW | {"dropout": 0.125}, "sm_90", 91600, "mem_efficient", False),
    ({"mask": "bool", "window": 400}, "sm_90", 91600, "mem_efficient", False),
    ({}, "sm_100", 91900, "cudnn", True),
    ({"mask": "float", "mask_grad": True}, "sm_100", 91900, "mem_efficient", True),
    ({"mask": "causal"}, "sm_80", 91600, "flash", True),
    ({"mask": "bool"}, "sm_80", 91600, "mem_efficient", True),
    ({"mask": "bool", "kv_heads": 2}, "sm_80", 91600, "flex", False),
    ({"mask": "bool", "head_dim": 100}, "sm_80", 91600, "flex", False),
    ({"dtype": torch.float32}, "sm_80", 91600, "mem_efficient", True),
    ({"dtype": torch.float32, "head_dim": 62}, "sm_80", 91600, "flex", False),
    ({"dtype": torch.float64}, "sm_80", 91600, "math", True),
    ({"head_dim": 8, "dtype": torch.float32, "value_dim": 6}, "sm_80", 91600, "math", True),
    ({"head_dim": 208, "training": True}, "sm_86", 91600, "mem_efficient", True),
    ({"head_dim": 208}, "sm_86", 91600, "flash", True),
    ({"head_dim": 256, "training": True}, "sm_89", 91600, "flash", True),
    ({"head_dim": 256, "training": True, "dropout": 0.5}, "sm_89", 91600, "mem_efficient", True),
    ({}, "sm_120", 91600, "flash", True),
    ({"dtype": torch.float16}, "sm_75", None, "mem_efficient", True),
    ({}, "sm_75", None, "math", True),
    ({}, "gfx942", None, "flash", True),
    ({"mask": "bool", "value_dim": 32}, "gfx942", None, "flex", False),
    ({}, None, None, "flash", True),
    ({"score_ops": frozenset({"softcap"})}, "sm_90", 91600, "flex", False),
    ({"score_ops": frozenset({"sink"}), "training": True}, "sm_90", 91600, "flex", False),
]


@pytest.mark.parametrize(("fields", "arch", "cudnn", "kernel", "by_default"), EXPECTED)
def test_choices_without_a_gpu(
    fields: dict[str, Any], arch: str | None, cudnn: int | None, kernel: str, by_default: bool
) -> None:
    found = choose(gpu(**fields), arch=arch, mode="auto", cudnn=cudnn)
    assert (found.kernel, found.by_default) == (kernel, by_default), found
    assert found.target == kernels("cuda")[kernel].target


def test_where_sdpa_itself_would_be_wrong_another_kernel_is_chosen() -> None:
    """Torch takes cuDNN there and gives NaN gradients, or none: the choice must differ, and say why."""
    p = gpu(mask="float", queries=192, training=True)
    found = choose(p, arch="sm_90", mode="sdpa", cudnn=91600)
    assert taken(p, arch="sm_90", cudnn=91600) == "cudnn" and (found.kernel, found.by_default) == (
        "mem_efficient",
        False,
    )
    assert found.rejected[0] == (
        "cudnn",
        (
            "cuDNN attention fails with a mask operand that is not aligned (CUDA error: misaligned address), and gives "
            "NaN gradients with some"
        ),
    )


def test_a_padded_mask_is_said_to_be_copied() -> None:
    for keys, copied in ((512, False), (500, True)):
        found = choose(gpu(mask="bool", keys=keys), arch="sm_80", mode="auto")
        assert (found.kernel, found.materialises, "copied to" in found.reason) == ("mem_efficient", copied, copied)


def test_modes() -> None:
    assert AttentionOptions.choices("mode") == MODES
    for mode, kernel in (("auto", "cpu_flash"), ("always", "cpu_flash"), ("sdpa", "cpu_flash"), ("flex", "flex")):
        assert choose(problem(), arch="cpu", mode=mode).kernel == kernel
    off = choose(problem(), arch="cpu", mode="off")
    assert (off.target, off.kernel, off.reason) == (None, "", "the option attention is 'off'")
    assert choose(problem(**WINDOW), arch="cpu", mode="sdpa").rejected[0] == (
        "flex", "FlexAttention is ruled out by the option attention = 'sdpa'",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="attention mode 'alwys': did you mean 'always'"):
        choose(problem(), arch="cpu", mode="alwys")


def test_what_is_not_available_is_not_chosen() -> None:
    assert choose(problem(**WINDOW), arch="cpu", mode="auto", available=usable("cpu", compiled=False)).target == "sdpa"
    assert usable("cpu", compiled=False) == {"cpu_flash", "blocks", "math"}
    assert usable("cpu", compiled=False, unfused=True) == {"cpu_flash", "blocks", "math", "flex_unfused"}
    assert usable("cuda", compiled=True) == set(kernels("cuda"))
    none = choose(problem(), arch="cpu", mode="auto", available=frozenset())
    assert none.target is None and none.reason.count("cannot be used here") == 5


def test_other_devices_have_no_kernel() -> None:
    assert choose(problem(device="xpu"), arch=None, mode="always").reason == (
        "no attention kernel is known for device type 'xpu'"
    )
    with pytest.raises(ConfigError, match="device type 'xpu'"):
        taken(problem(device="xpu"))
    assert usable("xpu", compiled=True) == frozenset() and present("xpu") == (None, None)


def test_a_softmax_in_float64_stays() -> None:
    p = problem(score_dtype=torch.float64)
    assert choose(p, arch="cpu", mode="always").target is None
    assert choose(replace(p, dtype=torch.float64), arch="cpu", mode="always").kernel == "cpu_flash"


REFUSALS = [
    ({"head_dim": 264}, "flash", "takes no head dim above 256: 264"),
    ({"head_dim": 100}, "cudnn", "needs a head dim that is a multiple of 8: 100"),
    ({"head_dim": 64, "value_dim": 12}, "flex", "takes no head dim of values under 16: 12"),
    ({"value_dim": 32}, "flash", "needs one head dim for keys and values, not 64 and 32"),
    ({"mask": "float"}, "flash", "takes no mask operand"),
    ({"mask": "float", "mask_grad": True}, "cudnn", "gives no gradient for the mask"),
    ({"kv_heads": 2}, "mem_efficient", "needs as many key heads as query heads, not 2 and 8"),
    ({"kv_heads": 3}, "flash", "needs as many key heads as query heads, not 3 and 8"),
    ({"dropout": 0.1}, "flex", "has no dropout"),
    ({"dtype": torch.float64}, "flash", "does not compute in float64"),
    ({"queries": 0}, "flash", "takes no empty tensor"),
    ({"score_ops": frozenset({"clamp", "softcap"})}, "flash", "cannot change scores by clamp or softcap"),
]


@pytest.mark.parametrize(("fields", "kernel", "words"), REFUSALS)
def test_refusals_in_words(fields: dict[str, Any], kernel: str, words: str) -> None:
    assert kernels("cuda")[kernel].refusal(Situation(gpu(**fields), "sm_90", 91600)) == words


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    rng = random.Random(draw(st.integers(0, 2**32)))
    p = random_problem(rng, draw(st.sampled_from(["cpu", "cuda"])))
    p = replace(
        p,
        queries=draw(st.integers(0, 700)),
        window=draw(st.none() | st.integers(1, 100)) if p.mask == "bool" else None,
        score_ops=frozenset(draw(st.sets(st.sampled_from(["softcap", "sink", "tensor_scale", "clamp"]), max_size=1))),
    )
    arch = "cpu" if p.device == "cpu" else draw(st.sampled_from([*ARCHES, "sm_75", "sm_999", "gfx1100", None]))
    return Situation(p, arch, draw(st.none() | st.integers(90000, 93000)))


@settings(max_examples=400, deadline=None)
@given(at=situations(), mode=st.sampled_from(MODES))
def test_a_choice_accepts_and_what_comes_before_it_refuses(at: Situation, mode: str) -> None:
    p, known = at.problem, kernels(at.problem.device)
    found = choose(p, arch=at.arch, mode=mode, cudnn=at.cudnn)
    assert found == choose(p, arch=at.arch, mode=mode, cudnn=at.cudnn) and found.reason
    if found.target is None:
        assert mode == "off" or len(found.rejected) >= len(known) - 1 or p.score_dtype == torch.float64
        return
    kernel = known[found.kernel]
    assert not kernel.refusal(at) and found.target == kernel.target and found.sources
    assert mode in ("auto", "always", found.target)
    assert found.materialises or kernel.fused
    for name, why in found.rejected:
        assert why.startswith(known[name].title + " ") and "{" not in why
        assert known[name].refusal(at) or known[name].target != mode
    if p.dropout:
        assert kernel.dropout
    if p.score_ops:
        assert found.target in ("flex", "blocks") and p.score_ops <= kernel.score_ops


def test_orders_name_every_kernel_they_may_and_end_with_the_one_that_computes_anything() -> None:
    for group in architectures().values():
        names = [place.kernel.name for place in group.order]
        known = kernels(group.device)
        assert len(set(names)) == len(names) and names[-2] == "math" and set(names) <= set(known)
        assert known[names[-1]].target == "flex"  # what cannot be had otherwise
        for default in (group.default, group.default_with_cudnn):
            assert all(known[name].target == "sdpa" for name in default) and (not default or "math" in default)
        assert group.names or group.key == "gpu"
    assert len(ARCHES) == len(set(ARCHES))


def test_orders_agree_with_the_rates_beside_them() -> None:
    compared = 0
    for group in architectures().values():
        position = {place.kernel.name: at for at, place in enumerate(group.order)}
        for one in group.rates:
            for other in group.rates:
                for field in ("forward", "backward", "both"):
                    a, b = getattr(one, field), getattr(other, field)
                    if one.head_dim == other.head_dim and a is not None and b is not None and a > 1.02 * b:
                        assert position[one.kernel] < position[other.kernel], (group.key, one, other)
                        compared += 1
    assert compared >= 4


def rules() -> Iterator[tuple[str, Any]]:
    for device in FILES:
        for name, kernel in kernels(device).items():
            yield from ((f"{device} {name}", rule) for rule in (*kernel.refuses, *kernel.materialises))


def test_every_figure_has_a_source_and_every_source_a_figure() -> None:
    tables = Path(targets.__file__).parent.glob("*.toml")
    text = "".join(path.read_text() for path in tables if path.name != "sources.toml")
    assert [key for key in sources() if f'"{key}"' not in text] == []
    assert all(kernel.sources for device in FILES for kernel in kernels(device).values())


def test_every_rule_and_every_condition_can_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule is dead: for each there is a problem for which it alone refuses. CPUs: `test_targets_cpu.py`."""
    monkeypatch.setattr(conditions, "slow_library", lambda: False)
    wanted = {id(rule): where for where, rule in rules() if where.startswith("cuda")}
    rng = random.Random(0)
    lengths = [1, 2, 64, 100, 128, 192, 208, 256]
    for _ in range(60000):
        if not wanted:
            break
        p = replace(
            random_problem(rng, "cuda"), dtype=rng.choice([torch.float16, torch.bfloat16]), mask_grad=False, kv_heads=6,
            heads=rng.choice([6, 6, 6, 70000]), batch=rng.choice([1, 1, 1, 70000]), queries=rng.choice(lengths),
            keys=rng.choice(lengths), head_dim=(dim := rng.choice([64, 64, 136, 192, 208, 232, 256])),
            value_dim=rng.choice([dim, dim, 128]),
        )  # fmt: skip
        p = replace(p, kv_heads=p.heads)
        at = Situation(
            p, rng.choice([*ARCHES, "sm_30", "sm_75", "sm_130", "gfx942"]), rng.choice([91002, 91300, 92300])
        )
        for kernel in kernels("cuda").values():
            if not (kernel._sizes(at) or kernel._features(at)):
                holding = [rule for rule in kernel.refuses if rule.says(at)]
                if len(holding) == 1:
                    wanted.pop(id(holding[0]), None)
            for rule in kernel.materialises:
                if rule.says(at):
                    wanted.pop(id(rule), None)
    assert wanted == {}
    used = {name for _, rule in rules() for name in rule.when}
    assert used == set(CONDITIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"titel": "x"}, "unknown key 'titel'"),
        ({"dtypes": None}, "missing key 'dtypes'"),
        ({"sources": ["nobody"]}, "source 'nobody' is not in sources.toml"),
        (
            {"refuses": [{"when": {"moon": 1}, "why": "x", "source": "sdp-cpp"}]},
            "unknown condition 'moon'; valid: arch",
        ),
        ({"refuses": [{"when": {}, "why": "x", "source": "sdp-cpp"}]}, "'when' has no conditions"),
    ],
)
def test_a_malformed_table_is_named(change: dict[str, Any], message: str) -> None:
    from optpass.passes.attention.targets.kernel import read

    raw = {k: v for k, v in (read(FILES["cpu"])["math"] | change).items() if v is not None}
    with pytest.raises(ConfigError, match=rf"^kernel 'math' \(cpu\): {message}"):
        from_toml("math", "cpu", raw)


def test_architectures_of_the_device_table() -> None:
    expected = {"h100": "sm_90", "a100": "sm_80", "b200": "sm_100", "mi300x": "gfx94x", "cpu": "cpu"}
    assert {key: arch_of(devices.resolve(key)) for key in expected} == expected
    assert present("cpu") == ("cpu", None)
    specs = [spec for spec in devices.table().values() if spec.kind != "cpu"]
    assert all(targets.architecture("cuda", arch_of(spec)) is not None for spec in specs)
