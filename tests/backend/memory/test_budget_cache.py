"""Plans and caches over processes: the same budget hits, another one misses, and the same plan comes out every time."""

from __future__ import annotations

import json

SCRIPT = """
    import json, sys, torch, optpass
    from optpass.passes.memory import refill
    from torch import nn

    refill.EFFORT_SMALL = refill.EFFORT_GAPS = 10_000
    for budget, optimizer, inner in (of.split() for of in sys.argv[1:]):
        torch._dynamo.reset()
        optpass.reset_report()
        torch.manual_seed(0)
        model = nn.Sequential(*[m for _ in range(2) for m in (nn.Linear(32, 32), nn.GELU())])
        x = torch.randn(256, 32)
        options = {"inner": inner, "memory_budget": int(budget), "optimizer": optimizer}
        loss = torch.compile(lambda: model(x).square().mean(), backend="optpass", options=options)()
        loss.backward()
        report = optpass.report()
        sites = [s for s in [*report.sites(), *report.declined()] if s.kind in ("memory budget", "recompute")]
        plan = [[s.kind, s.node, s.cost.get("predicted_peak_bytes"), s.cost.get("bytes")] for s in sites]
        gradients = float(sum(p.grad.sum() for p in model.parameters()))
        print(json.dumps({"cache": report.graphs[0].cache, "plan": plan, "sum": gradients}))
"""
TIGHT, ROOMY = 130_000, 1_000_000


def test_the_same_budget_hits_and_another_misses(python):
    def ran(*programs):
        return [json.loads(line) for line in python(SCRIPT, *programs).stdout.splitlines()]

    first, *others = ran(f"{TIGHT} none inductor", f"{ROOMY} none inductor", f"{TIGHT} sgd inductor")
    assert [one["cache"] for one in (first, *others)] == ["miss"] * 3
    assert any(kind == "recompute" for kind, *_ in first["plan"])
    (again,) = ran(f"{TIGHT} none inductor")
    assert again["cache"] == "hit" and again["sum"] == first["sum"]


def test_a_plan_does_not_depend_on_the_process(python):
    plans = [python(SCRIPT, "190000 none aot_eager", PYTHONHASHSEED=seed).json for seed in ("1", "2")]
    assert plans[0] == plans[1]
    assert any(kind == "recompute" for kind, *_ in plans[0]["plan"])
