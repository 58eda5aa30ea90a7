"""The collector: ids, threads, snapshots, sums; and the run id."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from optpass.errors import ReportError
from optpass.reporting.environment import environment, process_record, run_id
from optpass.reporting.model import DeviceRecord, GraphRecord, Group, Op, Totals
from optpass.reporting.store import ReportStore, current


def op(name: str, flops: float, dtype: str = "float32") -> Op:
    return Op(name=name, target="aten.mm.default", flops=flops, dtype=dtype, mnk=(1, 1, 1))


def test_threads_file_graphs_without_loss_or_shared_ids() -> None:
    store = ReportStore()
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(50):
            record = store.add_graph(GraphRecord(id=store.next_id()))
            store.add_analysis(record.id, [op("mm", 1.0)], [], {"x": 1}, Totals(flops=1.0))
            with store.lock:
                record.calls += 1
            store.warn("the same  warning")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = store.snapshot()
    assert sorted(int(graph.id) for graph in report.graphs) == list(range(400))
    assert report.totals.flops == 400 and report.unknown_ops == {"x": 400}
    assert all(graph.calls == 1 for graph in report.graphs)
    assert report.warnings == ["the same warning"]
    assert {o.graph for o in report.ops} == {graph.id for graph in report.graphs}


def test_snapshot_is_a_deep_copy() -> None:
    store = ReportStore()
    record = store.add_graph(GraphRecord(id=store.next_id(), t_compile_s=1.0))
    options = {"inductor": {"max_autotune": True}}
    store.set_options(options)
    before = store.snapshot("a name")
    record.t_compile_s = 5.0
    options["inductor"]["max_autotune"] = False
    assert before.name == "a name" and before.graphs[0].t_compile_s == 1.0
    assert before.options == {"inductor": {"max_autotune": True}}
    before.graphs[0].function = "changed"
    assert store.snapshot().graphs[0].function == ""
    assert store.snapshot().compile.t_compile_s == 5.0


def test_compile_cost_and_mfu_are_worked_out_from_the_records() -> None:
    store = ReportStore()
    store.set_device(DeviceRecord(key="x", name="X", peak_flops={"bfloat16": 2e12, "float32": 1e12}))
    for first in (2.0, None):
        record = store.add_graph(
            GraphRecord(id=store.next_id(), t_compile_s=1.5, t_passes_s=0.5, t_first_s=first, t_steady_s=0.1)
        )
        ops = [op("a", 3e6, "bfloat16"), op("b", 1e6, "float32"), op("c", 9e6, "no such dtype")]
        groups = [Group(index=0, kind="matmul", ops=["a"])]
        store.add_analysis(record.id, ops, groups, {}, Totals(flops=4e6, time_us=10))
    report = store.snapshot()
    assert report.compile.model_dump() == pytest.approx(
        {"graphs": 2, "t_compile_s": 3.0, "t_passes_s": 1.0, "t_first_s": 2.0, "t_steady_s": 0.2}
    )
    assert report.totals.mfu == pytest.approx(8e6 / (20e-6 * 2e12))
    assert [group.graph for group in report.groups] == ["0", "1"]


def test_a_second_analysis_replaces_the_first() -> None:
    store = ReportStore()
    store.add_graph(GraphRecord(id="7"))
    store.add_analysis("7", [op("a", 1.0), op("b", 1.0)], [], {"x": 1}, Totals(flops=2.0))
    store.add_analysis("7", [op("c", 5.0)], [], {}, Totals(flops=5.0))
    report = store.snapshot()
    assert [o.name for o in report.ops] == ["c"] and report.totals.flops == 5.0 and report.unknown_ops == {}


def test_misuse_is_named() -> None:
    store = ReportStore()
    store.add_graph(GraphRecord(id="0"))
    with pytest.raises(ReportError, match="'0' is in the report already"):
        store.add_graph(GraphRecord(id="0"))
    with pytest.raises(ReportError, match="'9' is not in the report"):
        store.add_analysis("9", [], [], {}, Totals())


def test_clear_forgets_records_but_not_ids() -> None:
    store = ReportStore()
    store.add_graph(GraphRecord(id=store.next_id()))
    store.warn("w")
    store.clear()
    report = store.snapshot()
    assert (report.graphs, report.warnings) == ([], [])
    assert store.next_id() == "1"


def test_another_device_is_warned_about() -> None:
    store = ReportStore()
    for name in ("A", "B", "B"):
        store.set_device(DeviceRecord(key=name, name=name))
    report = store.snapshot()
    assert report.device is not None and report.device.name == "A"
    assert len(report.warnings) == 1 and "A and for B" in report.warnings[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_starts_empty_even_when_the_lock_was_held() -> None:
    code = (
        "import os, threading\n"
        "from optpass.reporting.model import GraphRecord\n"
        "from optpass.reporting.store import current\n"
        "store = current(); store.add_graph(GraphRecord(id=store.next_id()))\n"
        "held, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with store.lock:\n"
        "        held.set(); done.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(len(current().snapshot().graphs))\n"
        "done.set(); thread.join()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(store.snapshot().graphs))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "1"], done.stderr


def test_there_is_one_store_per_process() -> None:
    assert current() is current()


def test_run_id_is_shared_with_children_and_follows_torchrun() -> None:
    made: dict[str, str] = {}
    first = run_id(made)
    assert made == {"OPTPASS_RUN_ID": first} and run_id(made) == first
    assert run_id({"OPTPASS_RUN_ID": "mine", "TORCHELASTIC_RUN_ID": "job"}) == "mine"
    assert run_id({"TORCHELASTIC_RUN_ID": "job"}) == "job"
    assert run_id({}) != run_id({})
    launched = run_id({"TORCHELASTIC_RUN_ID": "none"})
    assert launched != "none" and launched == run_id({"TORCHELASTIC_RUN_ID": "none"})


def test_environment_names_versions_and_processor_without_torch() -> None:
    code = (
        "import sys; from optpass.reporting.environment import environment; e = environment()\n"
        "import optpass.reporting.store, optpass.reporting.html, optpass.reporting.terminal\n"
        "assert 'torch' not in sys.modules; print(e['python'], e['torch'], bool(e['cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == environment()["python"] and done.stdout.split()[2] == "True"


def test_process_record_reads_torchrun_and_survives_nonsense() -> None:
    assert (process_record({"RANK": "3", "WORLD_SIZE": "8"}).rank, process_record({}).world_size) == (3, 1)
    assert process_record({"RANK": "x"}).rank == 0
