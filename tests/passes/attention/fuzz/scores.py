"""What happens to the scores: biases, masks, caps, casts; and the spellings of softmax."""

from __future__ import annotations

from attention_fuzz.operands import grad
from attention_fuzz.source import Source

SHAPES = (
    ("N", "M"), ("B", 1, 1, "M"), ("B", 1, "N", "M"), (1, "H", "N", "M"), ("H", "N", "M"), ("B", "H", "N", "M"),
    ("M",), (1, 1, "N", "M"), (1, 1, 1, "M"), (1, "M"),
)  # fmt: skip
ODD = ((), (1,), ("N", 1), ("H", 1, 1), ("B", 1, "N", 1), (1, "H", 1, "M"), ("B", "H", 1, 1), ("B", 1, 1, 1))
SHIFTS = (
    "s = s + 1.0", "s = s - s.amax(-1, keepdim=True)", "s = s - s.max(-1, keepdim=True).values.detach()",
    "s = 1.0 - s", "s = torch.rsub(s, 2.0)", "s = torch.rsub(s, 1.0, alpha=0.5)", "s = torch.sub(s, 1.0, alpha=-2)",
    "s = s.add(3.0, alpha=2)", "s = -s", "s = s - 5.0", "s = s / -2", "s = s - 1e9",
)  # fmt: skip
FILLS = ('float("-inf")', "torch.finfo(s.dtype).min", "-1e9") * 2 + ("-1e4",)
ODD_FILLS = ("0.0", "-1.0", "-5.0", "-50.0", "1e4", "torch.finfo(torch.float32).min", 'float("inf")', 'float("nan")')

FLOORS = (
    "s = torch.max(s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype))",
    "s = torch.maximum(torch.full((), torch.finfo(s.dtype).min), s)", "s = s.clamp(min=torch.finfo(s.dtype).min)",
    "s = s.clamp_min(torch.finfo(s.dtype).min)", "s = torch.max(s, torch.tensor(torch.finfo(torch.float32).min))",
    "s = torch.max(s, torch.tensor(-1e9))",
)  # fmt: skip


def bias(s: Source) -> None:
    """A floating term."""
    s.tag("bias")
    b = s.param("bias", "randn", s.choose(ODD) if s.often(15) else s.choose(SHAPES), grad(s))
    whole = f"{b}.expand(B, H, N, M).to(s.dtype)"
    s.line(s.choose((
        f"s = s + {b}", f"s = {b} + s", f"s = s.add({b})", f"s = s - {b}", f"s += {b}", f"s = s + 0.5 * {b}",
        f"s = torch.add(s, {b}, alpha=0.5)", f"s = s + {b}.to(s.dtype)", f"s = s + {b}.expand(B, H, N, M)",
        f"s = {b} - s", f"s = torch.rsub(s, {b})", f"s = torch.sub(s, {b}, alpha=-0.5)",
        f"s = torch.rsub({whole}, s, alpha=2)", f"s = torch.sub({whole}, s, alpha=2)",
        f"s = torch.add({whole}, s, alpha=-1)",
    )))  # fmt: skip


def keep(s: Source) -> str:
    """A name that holds True where a key is seen."""
    name = f"keep{sum(line.startswith('keep') for line in s.lines)}"
    how = s.weighted(tril=18, triu=8, compare=18, input=22, equal=12, lengths=8, window=8, document=3, both=6, none=5)
    if how == "both":
        first, second = keep(s), keep(s)
        name = f"keep{sum(line.startswith('keep') for line in s.lines)}"
        s.line(f"{name} = {first} {s.choose('&|')} {second}")
        return name
    if how == "none":
        s.line(f"{name} = " + s.choose(("torch.ones(N, M, dtype=torch.bool)", "torch.ones(N, M).triu(-N) > 0")))
        return name
    if how in ("tril", "triu", "compare", "window", "document"):
        s.line(f"{name} = {_by_place(s, how)}")
        if how == "tril" and s.often(20):
            s.line(f"{name} = {name}.expand(B, 1, N, M)")
        return name
    full = s.weighted(none=70, one=22, all=8)
    if how == "lengths":
        lengths = s.param("lengths", "lengths", ("B",), full=full)
        s.line(f"{name} = (torch.arange(M) < {lengths}[:, None])[:, None, None, :]")
        return name
    shape = s.choose(ODD) if s.often(10) else s.choose(SHAPES)
    if how == "input" or not shape:
        s.line(f"{name} = {s.param('mask', 'bool', shape, full=full)}")
        return name
    kind = s.choose(("zeros and ones", "float zeros and ones", "ints"))
    m = s.param("mask", kind, shape, full=full)
    test = s.choose((f"{m} != 0", f"~({m} == 0)", f"{m}.bool()", f"{m} > 0.5", f"{m} == 1", f"{m} >= 1"))
    s.line(f"{name} = {test}")
    return name


def _by_place(s: Source, how: str) -> str:
    off = s.choose((0, 0, 0, 0, 1, -1, 2, "M - N"))
    if how == "tril":
        return s.choose((
            f"torch.ones(N, M, dtype=torch.bool).tril({off})", f"torch.tril(torch.ones(N, M), {off}).bool()",
            "torch.ones(M, M).tril()[M - N if M >= N else 0:, :].bool()[:N].expand(N, M)" if off == "M - N"
            else f"torch.ones(1, 1, 12, 12).tril({off})[:, :, :N, :M] == 1",
        ))  # fmt: skip
    if how == "triu":
        ones = "torch.ones(N, M, dtype=torch.bool)"
        return s.choose((f"~{ones}.triu(1 + {off})", f"torch.ones(N, M).triu({off} + 1) == 0"))
    i, j = "torch.arange(N)[:, None]", "torch.arange(M)[None, :]"
    if how == "compare":
        return s.choose((
            f"{i} + {off} >= {j}", f"{j} <= {i} + {off}", f"~({j} > {i} + {off})", f"{i} - {j} >= -({off})",
            f"{i} > {j} - 1 - ({off})", f"{i} <= {j}",
        ))  # fmt: skip
    if how == "window":
        w = s.choose((1, 2, 3, 12))
        return s.choose((
            f"({i} >= {j}) & ({i} - {j} < {w})", f"({i} - {j}).abs() <= {w}", f"({i} >= {j}) & ({j} > {i} - {w})",
            f"({i} + M - N >= {j}) & ({i} + M - N - {j} < {w})",
        ))  # fmt: skip
    return f"({i} // 2 == {j} // 2) & ({i} >= {j})"


def mask(s: Source, odd: bool = False) -> None:
    """Hides keys, in one of the ways in which people do."""
    s.tag("mask")
    kept = keep(s)
    if s.often(8):
        s.line(f"{kept} = ~{kept}")
    if s.often(5):
        s.tag("mask written")
        s.line(f"{kept} = {kept}.clone()")
        s.line(f"{kept}[..., -1] = True")
    fill = s.choose(ODD_FILLS if odd else FILLS)
    if s.often(4):
        fill = f"torch.full([], {fill}, dtype=s.dtype)"
    finite = "inf" not in fill and "nan" not in fill
    s.line(s.choose((
        f"s = s.masked_fill(~{kept}, {fill})", f"s = s.masked_fill({kept}.logical_not(), {fill})",
        f"s = torch.where({kept}, s, {fill})", f"s = torch.where(~{kept}, {fill}, s)",
        f"s.masked_fill_(~{kept}, {fill})",
        f"s = s + torch.zeros({kept}.shape, dtype=s.dtype).masked_fill(~{kept}, {fill})",
        f"s = s + torch.where({kept}, 0.0, {fill}).to(s.dtype)",
        f"s = s + (1.0 - {kept}.to(s.dtype)) * {fill}" if finite
        else f"s = s.masked_fill(~{kept}.expand(B, H, N, M), {fill})",
    )))  # fmt: skip


def part(s: Source) -> None:
    """Hides a part of the scores, which is written to."""
    s.tag("part written")
    fill = s.choose(FILLS if s.often(85) else ODD_FILLS)
    if s.often(15):
        s.line("u = s.clone(); s = u")
    kept = f"torch.arange(M) != {s.choose((0, 1))}"
    s.line(s.choose((
        f"s[..., M // 2:] = {fill}", f"s[..., :1] = {fill}", f"s[..., -1] = {fill}", f"s[..., 1:M // 2 + 1] = {fill}",
        f"s[:, :, N // 2, 1:] = {fill}", f"s[:, 0, :, 1:] = {fill}", f"s[0, :, :, M // 2:] = {fill}",
        f"s[..., N // 2:, :M // 2] = {fill}", f"s[:, :, :1] = {fill}", f"s[:, 1:][..., 1:].fill_({fill})",
        f"s[..., ~({kept})] = {fill}", f"s[:, :, torch.arange(N)[:, None] < torch.arange(M)] = {fill}",
        f"s.view(B * H, N, M).masked_fill_(~({kept}), {fill})", f"s.view(B * H, N, M)[..., 1:].fill_({fill})",
        f"s.flatten(0, 1)[:, :, M // 2:] = {fill}", f"s.mT[..., 1:, :] = {fill}", f"s[..., ::2] = {fill}",
        f"t = s[..., 1:]; s.mul_(0.5); t.fill_({fill})",
    )))  # fmt: skip


def cap(s: Source) -> None:
    """A softcap, or nearly."""
    s.tag("softcap")
    plain = ("s = torch.tanh(s / 3.0) * 3.0", "s = 3.0 * (s / 3.0).tanh()") * 2
    s.line(s.choose((*plain, "s = torch.tanh(s / 3.0) * 2.0")))


def product(s: Source) -> None:
    """Another product of queries and keys, which all heads may share."""
    s.tag("product")
    q = s.param("other_q", "randn", (s.choose(("B", 1)), s.choose(("H", "H", 1)), "N", 3), grad(s))
    k = s.param("other_k", "randn", ("B", s.choose(("H", "H", 1)), "M", 3), grad(s))
    made = s.choose((f"({q} @ {k}.mT)", f"({k} @ {q}.mT).mT", f"torch.matmul({q} * 0.5, {k}.transpose(2, 3))"))
    s.line(s.choose((
        f"s = s + {made}", f"s = {made} + s", f"s = s - 0.3 * {made}", f"s = s.add({made}.to(s.dtype), alpha=-2)",
        f"s = {made} / 2 - s", f"s = (s + {made}) * 0.5",
    )))  # fmt: skip


def between(s: Source) -> None:
    """Up to three of the above, in any order."""
    for _ in range(s.choose((1, 0, 2, 1, 3))):
        step = s.weighted(mask=55, bias=25, cap=5, cast=8, shift=4, clamp=2, floor=5, product=12, part=8)
        if step == "mask":
            mask(s, odd=s.often(8))
        elif step == "part":
            part(s)
        elif step == "bias":
            bias(s)
        elif step == "product":
            product(s)
        elif step == "cap":
            cap(s)
        elif step == "cast":
            s.line(s.choose(("s = s.float()", "s = s.to(torch.float32)", "s = s.double()")))
        elif step == "shift":
            s.line(s.choose(SHIFTS))
        elif step == "floor":
            s.tag("floor")
            s.line(s.choose(FLOORS))
        else:
            s.line("s = s.clamp(-2.0, 2.0)")


def zeroed(s: Source) -> None:
    """Weights are set to zero where a mask hides their scores, or seems to."""
    kept = [line.split(" = ")[0] for line in s.lines if line.startswith("keep") and " = " in line]
    names = list(dict.fromkeys(name for name in kept if name.isidentifier()))
    while names and s.often(10):
        s.tag("weights zeroed")
        name = s.choose(names)
        s.line(s.choose((f"p = p.masked_fill(~{name}, 0.0)", f"p = torch.where({name}, p, 0.0)")))


def softmax(s: Source) -> None:
    """Writes `p`, in the dtype of v."""
    if s.often(6):
        s.tag("sink")
        sink = s.param("sink", "randn", ("H",), grad(s))
        s.line(f"s = torch.cat([s, {sink}.reshape(1, H, 1, 1).expand(B, H, N, 1).to(s.dtype)], dim=-1)")
        s.line("p = s.softmax(-1)[..., :-1].to(v.dtype)")
        return
    if s.often(3):
        s.tag("padded")
        number = s.choose(("0.0", "1.5", "-3.0"))
        if s.often(40):
            s.line(f"p = F.pad(s, (1, 0), value={number}).softmax(-1)[..., 1:].to(v.dtype)")
        else:
            s.line(f"p = F.pad(s, (0, 1), value={number}).softmax(-1)[..., :-1].to(v.dtype)")
        return
    if s.often(4):
        s.tag("sink behind")
        sink = s.param("sink", "randn", ("H",), grad(s))
        over = s.choose(("-1", "-1", "-1", "1", "-2"))
        dims = {"-1": "H, 1, 1", "1": "1, 1, 1", "-2": "H, 1, 1"}[over]
        sink = f"{sink}.reshape({dims})" if over != "1" else f"{sink}[:1].reshape({dims})"
        lse = f"s.logsumexp({over}, keepdim=True)" + (".mean(-1, keepdim=True)" if over != "-1" else "")
        s.line(s.choose((f"g = ({lse} - {sink}).sigmoid()",) * 4 + (f"g = ({sink} - {lse}).sigmoid()",)))
        s.line("p = (s.softmax(-1) * g).to(v.dtype)")
        return
    s.line("p = " + s.choose((
        "s.softmax(-1)", "F.softmax(s, dim=-1)", "torch.softmax(s, -1)",
        "F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)",
        "F.softmax(s.float(), dim=-1).type_as(q)", "torch.softmax(s, dim=3)", "s.log_softmax(-1).exp()",
        "(s - s.logsumexp(-1, keepdim=True)).exp()", "torch.nn.Softmax(dim=-1)(s)",
        "(e := torch.exp(s - s.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True)",
        "s.transpose(-1, -2).softmax(-2).transpose(-1, -2)", "s.flatten(0, 1).softmax(-1).view(s.shape)",
    )))  # fmt: skip
    s.line("p = p.to(v.dtype)")


def output(s: Source) -> None:
    """Writes `out` from p and v, and what follows."""
    s.line("out = " + s.choose((
        "p @ v", "torch.matmul(p, v)", 'torch.einsum("bhqk,bhkd->bhqd", p, v.expand(B, H, M, E))', "(v.mT @ p.mT).mT",
        "torch.bmm(p.flatten(0, 1), v.expand(B, H, M, E).reshape(B * H, M, E)).view(B, H, N, E)",
        "(p.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)",
        "p[..., M // 2:] @ v[..., M // 2:, :] + p[..., :M // 2] @ v[..., :M // 2, :]",
    )))  # fmt: skip
    end = s.weighted(merged=40, nothing=25, view=10, projected=10, residual=5, written=5, scaled=5)
    if end == "merged":
        s.line("out = out.transpose(1, 2).reshape(B, N, H * E)")
    elif end == "view":
        s.line("out = out.permute(0, 2, 1, 3).contiguous().view(B, N, -1)")
    elif end == "projected":
        width = s.sizes["H"] * s.sizes["E"]
        weight = s.param("w_out", "randn", (width, 5), grad(s))
        s.line(f"out = out.transpose(1, 2).flatten(2) @ {weight}")
    elif end == "residual":
        s.line("out = out + v.mean(2, keepdim=True)")
    elif end == "written":
        s.line("out.mul_(2)")
    elif end == "scaled":
        s.line("out = out * 0.5 + 1")
