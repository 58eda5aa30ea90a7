"""What makes a program something else than attention, or attention with a snag: inserted at one place each.

Places: 'operands' before the product, 'scores' after it, 'logits' right before the softmax, 'weights' after it,
'between' before the product with v, 'end' when the output is there.
"""

from __future__ import annotations

from attention_fuzz.source import Source

#: place -> (name, source text, condition: "inference" where autograd would refuse it, "random" where it draws numbers)
TWISTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "operands": (
        ("keys rolled", "k = k.roll(1, 2)", ""),
        ("values flipped", "v = v.flip(2)", ""),
        ("key detached", "k = k.detach()", ""),
        ("query detached", "q = q.detach()", ""),
        ("value detached", "v = v.detach()", ""),
        ("value written", "v = v * 1.0; v[..., 0, :] = 0.5", ""),
        ("query written", "q = q.clone(); q[..., 0].mul_(2)", ""),
        ("heads flipped", "k = k.flip(1)", ""),
        ("batch broadcast", "k = k[:1]", ""),
        ("keys masked", "k = k.masked_fill(torch.arange(M)[:, None] == 0, 0.0)", ""),
        ("values attended first", "v = (v @ v.mT * 0.3).softmax(-1) @ v", ""),
        ("queries attended first", "q = (q @ q.mT * 0.3).softmax(-1) @ q", ""),
        ("keys extended", "k = torch.cat([k, k[:, :, :1]], 2); v = torch.cat([v, v[:, :, :1]], 2); M = M + 1", ""),
    ),
    "scores": (
        ("relu", "s = s.relu()", ""),
        ("square", "s = s * s * 0.1", ""),
        ("sine", "s = s.sin()", ""),
        ("rounded", "s = s.round()", ""),
        ("clamped", "s = s.clamp(-0.5, 0.5)", ""),
        ("sigmoid", "s = s.sigmoid()", ""),
        ("mean taken", "s = s - s.mean(-1, keepdim=True)", ""),
        ("column mean taken", "s = s - s.mean(-2, keepdim=True)", ""),
        ("standardised", "s = s / (s.std(-1, keepdim=True, correction=0) + 1.0)", ""),
        ("scores returned", "extra.append(s)", ""),
        ("scores summed", "extra.append(s.sum())", ""),
        ("scores sliced", "extra.append(s[..., :1])", ""),
        ("scores detached", "s = s.detach()", ""),
        ("noise", "s = s + torch.randn_like(s)", "random"),
        ("dropout of scores", "s = F.dropout(s, 0.3, True)", "random"),
        ("heads averaged", "s = s.mean(1, keepdim=True).expand(B, H, N, M)", ""),
        ("heads mixed", "s = s + s.flip(1)", ""),
        ("tril of scores", "s = s.tril()", ""),
        ("masked by itself", "s = s.masked_fill(s < 0, -1e4)", ""),
        ("top one", "s = s.masked_fill(s < s.amax(-1, keepdim=True), -2.0)", ""),
        ("key written after", "k = k.clone(); t0 = q @ k.mT; k.zero_(); s = s + 0 * t0", "inference"),
        ("column written", "s[..., 0] = 0.5", ""),
        ("column written through a view", "s.select(-1, 0).add_(1.0)", ""),
        ("query written after", "q = q.clone(); s = (q @ k.mT) * 0.5; q.add_(1); extra.append(q)", "inference"),
        ("scores under no_grad", "with torch.no_grad(): s = s * 2", ""),
        ("repeated bias", "u = s.detach()[..., :1] * 0\nfor _ in range(12): u = u + u\ns = u + s", ""),
    ),
    "logits": (
        ("softmax twice", "s = s.softmax(-1)", ""),
        ("softmax over queries before", "s = s.softmax(-2)", ""),
        ("sink", "s = torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1].log()", ""),
        ("cast to half", "s = s.half().to(v.dtype)", ""),
        ("cast to bfloat16", "s = s.bfloat16().to(v.dtype)", ""),
        ("scaled again", "s = s * 1.5", ""),
        ("negated", "s = -s", ""),
        ("flipped", "s = s.flip(-1)", ""),
        ("transposed", "s = s.mT if N == M else s", ""),
        ("logits returned", "extra.append(s)", ""),
        ("logsumexp returned", "extra.append(s.logsumexp(-1))", ""),
        ("nan_to_num", "s = s.nan_to_num()", ""),
        ("keys dropped before", "i = M // 3; s, v, M = s[..., i:], v[..., i:, :], M - i", ""),
        ("queries dropped", "i = N // 3; s, N = s[..., i:, :], N - i", ""),
        ("temperature by row", "s = s / (1 + s.detach().abs().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0))", ""),
    ),
    "weights": (
        ("weights returned", "extra.append(p)", ""),
        ("weights averaged", "extra.append(p.mean(1))", ""),
        ("weights' largest", "extra.append(p.amax(-1))", ""),
        ("weights' first key", "extra.append(p[..., 0])", ""),
        ("weights detached and returned", "extra.append(p.detach())", ""),
        ("weights squared", "p = p * p", ""),
        ("weights shifted", "p = p + 0.1", ""),
        ("weights clamped", "p = p.clamp(min=0.05)", ""),
        ("weights' root", "p = (p + 1e-3).sqrt()", ""),
        ("weights detached", "p = p.detach()", ""),
        ("weights half detached", "p = 0.5 * p + 0.5 * p.detach()", ""),
        ("weights masked", "p = p.masked_fill(torch.arange(M) == 0, 0.0)", ""),
        ("weights' tril", "p = p.tril()", ""),
        ("weights normalised", "p = p / p.sum(-1, keepdim=True)", ""),
        ("weights normalised over queries", "p = p / (p.sum(-2, keepdim=True) + 0.1)", ""),
        ("weights rolled", "p = p.roll(1, -1)", ""),
        ("weights flipped", "p = p.flip(-1)", ""),
        ("weights transposed", "p = p.mT if N == M else p", ""),
        ("weights scaled", "p = p * 0.9", ""),
        ("weights scaled by head", "p = p * (torch.arange(H).to(p.dtype) + 1)[:, None, None]", ""),
        ("weights scaled by query", "p = p * (torch.arange(N).to(p.dtype) + 1)[:, None]", ""),
        ("weights scaled by key", "p = p * (torch.arange(M).to(p.dtype) + 1)", ""),
        ("noise on weights", "p = p + 0.1 * torch.rand_like(p)", "random"),
        ("dropout", "p = F.dropout(p, 0.3, True)", "random"),
        ("dropout of nothing", "p = F.dropout(p, 0.0, True)", ""),
        ("dropout, not training", "p = F.dropout(p, 0.3, False)", ""),
        ("cumulative", "p = p.cumsum(-1)", ""),
        ("nan_to_num on weights", "p = p.nan_to_num(0.0)", ""),
        ("weights written", "p[..., 0] = 0", "inference"),
        ("scores written after", "s.zero_()", "inference"),
        ("rounded weights", "p = p.bfloat16().to(v.dtype)", ""),
        ("heads' mean weights", "p = p.mean(1, keepdim=True).expand(B, H, N, M)", ""),
        ("softmax over queries instead", "p = s.softmax(-2).to(v.dtype)", ""),
        ("softmax over heads instead", "p = s.softmax(1).to(v.dtype)", ""),
        ("softmax over the batch instead", "p = s.softmax(0).to(v.dtype)", ""),
        ("weights of exp2", "p = (e := torch.exp2(s)) / e.sum(-1, keepdim=True); p = p.to(v.dtype)", ""),
        ("quiet softmax", "p = (e := s.exp()) / (1 + e.sum(-1, keepdim=True)); p = p.to(v.dtype)", ""),
        (
            "side by side",
            "i = M // 2; p = torch.cat([s[..., :i].softmax(-1), s[..., i:].softmax(-1)], -1).to(v.dtype)",
            "",
        ),
        (
            "beside others",
            (
                "i = (q @ k[..., :2, :].mT).softmax(-1).to(v.dtype) * 0.5; p = torch.cat([i, p], -1)"
                "; v = torch.cat([v[..., :2, :] * 3, v], -2); M = v.shape[-2]"
            ),
            "",
        ),
        ("exponentials' tril", "e = (s - s.amax(-1, True)).exp().tril(1); p = (e / e.sum(-1, True)).to(v.dtype)", ""),
        ("keys dropped", "p = p[..., 1:] if M > 1 else p; v = v[..., 1:, :] if M > 1 else v; M = max(M - 1, 1)", ""),
    ),
    "between": (
        ("value written between", "v = v * 1.0; w = v[..., :1, :]; w.add_(1)", ""),
        ("value rolled", "v = v.roll(1, -2)", ""),
        ("value gated", "v = v * v.sigmoid()", ""),
        ("value widened", "v = F.pad(v, (0, 1), value=1.0); E = E + 1", ""),
        ("value squared", "v = v * v", ""),
        ("value of ones", "v = torch.ones_like(v)", ""),
        ("value of another head", "v = v.flip(1)", ""),
    ),
    "end": (
        ("weights written after", "p.zero_()", "inference"),
        ("value written after", "v = v.clone(); v.zero_(); extra.append(v)", ""),
        ("product again", "extra.append(p @ v)", ""),
        ("weights on other values", "extra.append(p @ (v * 2))", ""),
        ("output twice", "extra.append(out * 2)", ""),
        ("output detached", "extra.append(out.detach())", ""),
        ("gate by weights", "out = out + p.amax()", ""),
        ("hook", "out.register_hook(lambda g: g * 2) if out.requires_grad else None", ""),
    ),
}


def plan(s: Source) -> dict[str, list[str]]:
    """Which twists stand at which place: none in most programs, else one or two."""
    chosen: dict[str, list[str]] = {place: [] for place in TWISTS}
    for _ in range(s.choose((0, 0, 0, 0, 0, 0, 1, 1, 1, 2))):
        place = s.weighted(weights=35, scores=25, logits=12, operands=12, between=8, end=8)
        name, lines, condition = s.choose(TWISTS[place])
        if condition == "inference" and s.mode != "inference":
            continue
        s.random = s.random or condition == "random"
        s.tag(f"twist: {name}")
        chosen[place].append(lines)
    return chosen


def write(s: Source, lines: list[str]) -> None:
    """Write the twists of one place."""
    for text in lines:
        for line in text.split("\n"):
            s.line(line)
