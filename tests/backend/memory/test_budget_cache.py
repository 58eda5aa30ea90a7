"""Plans and caches over processes: the same budget hits, another one misses, and the same plan comes out every time."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
    import json, sys, torch, optpass
    from optpass.passes.memory.search import refill
    from torch import nn

    refill.EFFORT_SMALL = refill.EFFORT_GAPS = 10_000
    torch._inductor.config.fallback_by_default = True  # no kernels: caches hold graphs that are quickly made
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
        plan = [[s.kind, s.node, s.line, s.cost.get("predicted_peak_bytes"), s.cost.get("bytes")] for s in sites]
        gradients = float(sum(p.grad.sum() for p in model.parameters()))
        print(json.dumps({"cache": report.graphs[0].cache, "plan": plan, "sum": gradients}))
"""
TIGHT, ROOMY = 240_000, 1_000_000
#: A graph that runs three times in a step.
STEPS = """
    import json, sys, torch, optpass
    from torch import nn

    torch._inductor.config.fallback_by_default = False
    torch._dynamo.reset()
    optpass.reset_report()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    options = {"memory_budget": 1_000_000, "optimizer": "none"}
    block, x = torch.compile(model, backend="optpass", options=options), torch.randn(128, 64)
    for _ in range(3):
        model.zero_grad()
        block(block(block(x))).square().mean().backward()
    sites = [s for g in optpass.report().graphs for p in g.passes for s in [*p.applied, *p.declined]]
    print(json.dumps([s.cost["predicted_peak_bytes"] for s in sites if s.kind == "memory budget"]))
"""


@pytest.mark.slow
def test_plans_in_two_processes(python):
    """The same budget hits and another one misses; what no cache knows comes out the same in every process."""

    def ran(seed, *programs, moved=0):
        done = python("\n" * moved + SCRIPT + STEPS, *programs, PYTHONHASHSEED=seed)
        return [json.loads(line) for line in done.stdout.splitlines()]

    tight, searched = f"{TIGHT} none inductor", "190000 none aot_eager"
    first, roomy, stateful, plan, steps = ran("1", tight, f"{ROOMY} none inductor", f"{TIGHT} sgd inductor", searched)
    again, plan_again, steps_again = ran("2", tight, searched, moved=1)

    assert [one["cache"] for one in (first, roomy, stateful)] == ["miss"] * 3
    assert any(kind == "recompute" for kind, *_ in first["plan"])
    assert again["cache"] == "hit" and again["sum"] == first["sum"]
    assert any(kind == "recompute" for kind, *_ in plan["plan"])
    assert plan_again["sum"] == plan["sum"]
    line = 2  #: of a site, which the caches do not know
    for one, other in ((first, again), (plan, plan_again)):
        for before, now in zip(one["plan"], other["plan"], strict=True):
            assert now[line] == (before[line] and before[line] + 1)
            assert now[:line] + now[line + 1 :] == before[:line] + before[line + 1 :]
    # The caches know no search: with what they gave alone, a step whose graph runs several times was refused.
    assert steps and steps_again == steps
