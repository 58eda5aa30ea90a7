"""Plans and caches over processes: the same budget hits, another one misses, and the same plan comes out every time."""

from __future__ import annotations

SCRIPT = """
    import json, sys, torch, optpass
    from torch import nn

    budget, optimizer, inner = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])
    x = torch.randn(256, 32)
    options = {"inner": inner, "memory_budget": budget, "optimizer": optimizer}
    loss = torch.compile(lambda: model(x).square().mean(), backend="optpass", options=options)()
    loss.backward()
    report = optpass.report()
    graph = report.graphs[0]
    sites = [s for s in [*report.sites(), *report.declined()] if s.kind in ("memory budget", "recompute")]
    plan = [[s.kind, s.node, s.cost.get("predicted_peak_bytes"), s.cost.get("bytes")] for s in sites]
    print(json.dumps({"cache": graph.cache, "plan": plan, "sum": float(sum(p.grad.sum() for p in model.parameters()))}))
"""


def test_the_same_budget_hits_and_another_misses(python):
    first = python(SCRIPT, "450000", "none", "inductor").json
    assert first["cache"] == "miss"
    again = python(SCRIPT, "450000", "none", "inductor").json
    assert again["cache"] == "hit" and again["sum"] == first["sum"]
    assert python(SCRIPT, "1000000", "none", "inductor").json["cache"] == "miss"
    assert python(SCRIPT, "450000", "sgd", "inductor").json["cache"] == "miss"


def test_a_plan_does_not_depend_on_the_process(python):
    plans = [python(SCRIPT, "300000", "none", "aot_eager", PYTHONHASHSEED=seed).json for seed in ("1", "2")]
    assert plans[0] == plans[1]
    assert any(kind == "recompute" for kind, *_ in plans[0]["plan"])
