"""q, k and v: where they come from, how they are laid out, which heads meet, and the product of q and k."""

from __future__ import annotations

from attention_fuzz.source import Source

FLOATS = ("float32",) * 6 + ("bfloat16", "bfloat16", "float16", "float64")


#: B, H, G (heads of k and v), N (queries), M (keys), D (head dim of q and k), E (of v). Few, since torch remembers what
#: it found out about shapes; equal lengths in most, since much that is wrong has a valid shape only there.
SIZES = (
    (2, 4, 4, 6, 6, 8, 8), (2, 4, 2, 6, 6, 8, 8), (2, 4, 4, 6, 6, 8, 8), (4, 4, 4, 4, 4, 4, 4), (1, 2, 1, 5, 5, 4, 4),
    (2, 3, 3, 5, 7, 8, 3), (2, 4, 1, 6, 6, 8, 8), (2, 2, 2, 1, 7, 8, 8), (1, 6, 2, 7, 3, 4, 4), (3, 1, 1, 1, 1, 1, 1),
)  # fmt: skip


def sizes(s: Source) -> None:
    """Sizes, dtype, mode and whether lengths are dynamic."""
    s.sizes = dict(zip("BHGNMDE", s.choose(SIZES), strict=True))
    s.dtype = s.choose(FLOATS)
    s.mode = s.weighted(training=60, inference=40)
    s.dynamic = s.often(10)
    if s.dynamic:
        equal = s.sizes["N"] == s.sizes["M"]
        s.others = [{**s.sizes, "N": 8, "M": 8 if equal else 10}]


def grad(s: Source) -> bool:
    """Most inputs need a gradient."""
    return not s.often(15)


def operands(s: Source) -> None:
    """Writes q (B, H, N, D), k (B, G, M, D) and v (B, G, M, E)."""
    z = s.sizes
    packed = z["N"] == z["M"] and z["G"] == z["H"] and z["D"] == z["E"]
    how = s.weighted(separate=70, packed=20 if packed else 1, shared=10 if packed else 1)
    if how == "packed" and packed:
        _packed(s)
    elif how == "shared" and packed:
        _shared(s)
    else:
        for name, heads, length, width in (("q", "H", "N", "D"), ("k", "G", "M", "D"), ("v", "G", "M", "E")):
            _one(s, name, heads, length, width)
    s.line("B, H, N, D = q.shape")
    s.line("G, M, E = k.shape[1], k.shape[2], v.shape[3]")
    for name in "qkv":
        if s.often(12):
            _prepared(s, name)


def _one(s: Source, name: str, heads: str, length: str, width: str) -> None:
    z = s.sizes
    layout = s.weighted(bhsd=40, bshd=25, bsc=25, sbc=5, linear=10)
    if layout == "bhsd":
        s.param(name, "randn", ("B", heads, length, width), grad(s))
        return
    if layout == "bshd":
        source = s.param(f"{name}_in", "randn", ("B", length, heads, width), grad(s))
        turned = s.choose((
            ".transpose(1, 2)", ".permute(0, 2, 1, 3)", ".swapaxes(-3, -2)", ".transpose(1, 2).contiguous()"
        ))  # fmt: skip
        s.line(f"{name} = {source}{turned}")
        return
    h, w = z[heads], z[width]
    if layout == "sbc":
        source = s.param(f"{name}_in", "randn", (length, "B", h * w), grad(s))
        s.line(f"{name} = {source}.view({source}.shape[0], {source}.shape[1], {h}, {w}).permute(1, 2, 0, 3)")
        return
    source = s.param(f"{name}_in", "randn", ("B", length, h * w if layout == "bsc" else 5), grad(s))
    if layout == "linear":
        weight = s.param(f"{name}_w", "randn", (h * w, 5), grad(s))
        s.line(f"{name}_p = F.linear({source}, {weight}) / 3")
        source = f"{name}_p"
    split = s.choose((
        f".view({source}.shape[0], {source}.shape[1], {h}, {w})", f".unflatten(-1, ({h}, {w}))",
        f".reshape({source}.shape[0], -1, {h}, {w})",
    ))  # fmt: skip
    s.line(f"{name} = {source}{split}.transpose(1, 2)")


def _packed(s: Source) -> None:
    z = s.sizes
    h, w = z["H"], z["D"]
    x = s.param("x", "randn", ("B", "N", 3 * h * w), grad(s))
    shape = f"{x}.shape[0], {x}.shape[1]"
    how = s.choose(("chunk", "threes", "by head", "split", "last"))
    if how in ("chunk", "split"):
        parts = f"{x}.chunk(3, dim=-1)" if how == "chunk" else f"{x}.split({h * w}, -1)"
        s.line(f"q, k, v = (t.view({shape}, {h}, {w}).transpose(1, 2) for t in {parts})")
    elif how == "threes":
        s.line(f"q, k, v = {x}.view({shape}, 3, {h}, {w}).permute(2, 0, 3, 1, 4).unbind(0)")
    elif how == "by head":
        s.line(f"q, k, v = {x}.view({shape}, {h}, 3, {w}).permute(3, 0, 2, 1, 4)")
    else:
        s.line(f"q, k, v = {x}.view({shape}, {h}, {w}, 3).permute(4, 0, 2, 1, 3)")
    s.tag("packed")


def _shared(s: Source) -> None:
    x = s.param("x", "randn", ("B", "H", "N", "D"), grad(s))
    which = s.choose(("q is k", "k is v", "all"))
    if which == "all":
        s.line(f"q = k = v = {x}")
        return
    other = s.param("y", "randn", ("B", "H", "N", "D"), grad(s))
    s.line(f"q, k, v = {x}, {x}, {other}" if which == "q is k" else f"q, k, v = {other}, {x}, {x}")


def _prepared(s: Source, name: str) -> None:
    """What is done to one operand before the product."""
    s.line(f"{name} = " + s.choose((
        f"{name}.contiguous()", f"{name} * 1.0", f"{name}.clone()", f"F.normalize({name}, dim=-1)", f"{name} + 0.5",
        f"F.layer_norm({name}, {name}.shape[-1:])", f"{name}.float().to({name}.dtype)", f"{name}.flip(-1)",
        f"torch.cat([-{name}[..., 1:], {name}[..., :1]], -1) * 0.5 + {name}",
        f"{name}.transpose(-1, -2).contiguous().mT",
    )))  # fmt: skip


def heads(s: Source) -> None:
    """Makes k and v meet the heads of q; the tiled order is as good a program as the other."""
    z = s.sizes
    if z["G"] == z["H"]:
        return
    s.tag("grouped")
    n = z["H"] // z["G"]
    how = s.weighted(interleave=30, expand=30, tile=12, broadcast=10 if z["G"] == 1 else 1, index=5, mixed=5, stack=5)
    if how == "broadcast" and z["G"] == 1:
        return
    spelled = {
        "interleave": f"{{x}}.repeat_interleave({n}, dim=1)",
        "expand": f"{{x}}[:, :, None].expand(B, G, {n}, M, {{x}}.shape[-1]).reshape(B, H, M, {{x}}.shape[-1])",
        "tile": f"{{x}}.repeat(1, {n}, 1, 1)",
        "index": f"{{x}}[:, torch.arange(H) // {n}]",
        "stack": f"torch.stack([{{x}}] * {n}, 2).flatten(1, 2)",
    }
    first = spelled["interleave" if how in ("mixed", "broadcast") else how]
    second = spelled["tile"] if how == "mixed" else first
    s.line(f"k, v = {first.format(x='k')}, {second.format(x='v')}")


def scale(s: Source) -> tuple[str, str]:
    """What q and k are multiplied by before the product, and the scores after it: source text, or ''."""
    value = s.choose(("D**-0.5", "0.5", "0.125", "1 / math.sqrt(D)", "0.3", "0.25"))
    if s.often(10):
        value = s.choose(("-0.4", "1.0", "2.0", "math.log(M + 1)", "torch.tensor(0.35, dtype=q.dtype)"))
    if s.often(10):
        s.tag("tensor scale")
        shape = s.choose(((), (), (1,), ("H", 1, 1), ("N", 1), ("B", 1, 1, 1)))
        value = s.param("t", "positive", shape, grad(s))
    where = s.weighted(after=45, query=25, none=10, both=10, key=5, twice=5)
    if where == "both":
        s.line(f"q, k = q * {value} ** 0.5, k * {value} ** 0.5" if "-" not in value[:1] else f"q = q * {value}")
        return "", ""
    if where in ("query", "key", "twice") and "t" not in {p.name for p in s.params}:
        name = "k" if where == "key" else "q"
        s.line(f"{name} = {name} * {value}")
        return "", "0.5" if where == "twice" else ""
    return "", "" if where == "none" else value


def product(s: Source, after: str) -> None:
    """Writes `s`, the scores (B, H, N, M)."""
    rows, columns = "q.reshape(B * H, N, D)", "k.expand(B, H, M, D).reshape(B * H, M, D).transpose(1, 2)"
    if s.often(6):
        s.tag("baddbmm")
        bias = s.param("base", "randn", s.choose((("B", "H", "N", "M"), (1, "H", "N", "M"), (1, 1, "N", "M"))), grad(s))
        numbers = s.choose((", beta=0.5, alpha=0.3", ", beta=0, alpha=0.3", ", alpha=0.3", ", beta=2.0"))
        s.line(f"base_3d = {bias}.expand(B, H, N, M).reshape(B * H, N, M)")
        s.line(f"s = torch.baddbmm(base_3d, {rows}, {columns}{numbers}).view(B, H, N, M)")
        return
    how = s.choose((
        "q @ k.transpose(-2, -1)", "q @ k.mT", "torch.matmul(q, k.permute(0, 1, 3, 2))",
        "torch.matmul(q, k.transpose(2, 3))",
        "(k @ q.mT).mT", 'torch.einsum("bhqd,bhkd->bhqk", q, k.expand(B, H, M, D))', "(q @ k.mT).contiguous()",
        "(q.unsqueeze(1) @ k.mT.unsqueeze(1)).squeeze(1)", f"torch.bmm({rows}, {columns}).view(B, H, N, M)",
        "(q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)",
        "torch.cat([q @ k[..., : M // 2, :].mT, q @ k[..., M // 2 :, :].mT], -1)",
    ))  # fmt: skip
    s.line(f"s = {how}")
    if after:
        s.line(s.choose((
            f"s = s * {after}", f"s = {after} * s", f"s = s / (1 / ({after}))", f"s = s.mul({after})", f"s *= {after}",
        )))  # fmt: skip
