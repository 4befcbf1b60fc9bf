"""Traces of other tools, in the form that they write them; damaged ones end in a sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from convmesh.errors import MistakeList, ProfileError
from convmesh.profiling.analysis import analyse
from convmesh.profiling.breakdown import break_down
from convmesh.profiling.events import Trace
from convmesh.profiling.importing.find import import_profiles


def _event(category: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    thread = args.pop("tid", 1)
    return {
        "ph": "X", "cat": category, "name": name, "pid": 5, "tid": thread, "ts": start, "dur": length, "args": args
    }  # fmt: skip


def _kineto(path: Path, events: list[dict[str, Any]], *, rank: int | None = 0) -> Path:
    about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}} if rank is not None else {}
    text = json.dumps({"schemaVersion": 1, **about, "traceEvents": events, "traceName": path.name})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def _gpu_events(start: float = 0) -> list[dict[str, Any]]:
    nccl = {"stream": 20, "In msg nelems": 1000, "dtype": "BFloat16", "Collective name": "allreduce"}
    return [
        event | {"ts": event["ts"] + start}
        for event in [
            _event("user_annotation", "ProfilerStep#3", 0, 1000),
            _event("cpu_op", "aten::conv2d", 0, 900),
            _event("kernel", "cudnn_conv", 100, 400, stream=7),
            _event("kernel", "ncclDevKernel_AllReduce", 400, 300, **nccl, **{"Process Group Description": "mesh_dp"}),
            _event("gpu_user_annotation", "Optimizer.step#SGD.step", 690, 120),
            _event("kernel", "multi_tensor_apply", 700, 100, stream=7),
            _event("user_annotation", "enumerate(DataLoader)#_Multi.__next__", 850, 100),
            {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Total Allocated": 77, "Device Type": 1}},
            {"ph": "i", "name": "[memory]", "ts": 6, "args": {"Total Allocated": 99, "Device Type": 0}},
        ]
    ]


def test_kineto_of_a_gpu_counts_kernels_not_their_launches(tmp_path: Path) -> None:
    trace = import_profiles([_kineto(tmp_path / "trace.json.gz", _gpu_events(), rank=3)])

    parts = break_down(trace)
    (events,) = trace.ranks
    assert events.rank == 3
    assert parts.step_S.tolist() == [3]
    assert parts.compute_RS[0, 0] == pytest.approx(500e-6)
    assert parts.optimizer_RS[0, 0] == pytest.approx(100e-6)
    assert parts.hidden_RS[0, 0] == pytest.approx(100e-6)
    assert parts.exposed_RS[0, 0] == pytest.approx(200e-6)
    assert parts.data_RS[0, 0] == pytest.approx(100e-6)
    assert parts.idle_RS[0, 0] == pytest.approx(200e-6)
    assert parts.axes == ("mesh_dp",)
    assert events.num_bytes_E.max() == 2000
    assert events.memory_bytes_M.tolist() == [77]


def test_kineto_of_a_cpu_counts_outermost_operators_and_gloo(tmp_path: Path) -> None:
    gloo = {"Input Dims": [[10, 5]], "Input type": ["float"], "tid": 2}
    events = [
        _event("user_annotation", "Optimizer.step#SGD.step", 50, 50),
        _event("user_annotation", "enumerate(DataLoader)#_Single.__next__", 100, 100),
        _event("cpu_op", "aten::stack", 120, 50),
        _event("cpu_op", "aten::conv2d", 200, 300),
        _event("cpu_op", "aten::convolution", 210, 280),
        _event("cpu_op", "c10d::allreduce_", 500, 10),
        _event("user_annotation", "gloo:all_reduce", 450, 150, **gloo),
        _event("user_annotation", "Optimizer.step#SGD.step", 600, 100),
        _event("cpu_op", "aten::add_", 610, 80),
    ]

    trace = import_profiles([_kineto(tmp_path / "trace.json", events)])

    parts = break_down(trace)
    assert parts.step_RS[0].tolist() == pytest.approx([600e-6])
    assert parts.data_RS[0, 0] == pytest.approx(100e-6)
    assert parts.compute_RS[0, 0] == pytest.approx(380e-6)
    assert parts.optimizer_RS[0, 0] == pytest.approx(80e-6)
    assert parts.exposed_RS[0, 0] == pytest.approx(100e-6)
    names = {row.name: row for row in analyse(trace).layers}
    assert "aten::convolution" not in names
    assert names["all_reduce"].num_bytes == 200


def test_a_folder_of_traces_is_read_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    for rank in (10, 2, 1):
        _kineto(tmp_path / f"worker{rank}.json", _gpu_events(), rank=None)

    trace = import_profiles([tmp_path])

    assert [events.rank for events in trace.ranks] == [0, 1, 2]
    assert trace.engine == "torch"


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_ends_in_its_middle_gives_what_it_has_and_says_so(tmp_path: Path, packed: bool) -> None:
    events = [event for start in range(0, 3000, 1000) for event in _gpu_events(start)]
    for number, event in enumerate(event for event in events if event["name"].startswith("ProfilerStep")):
        event["name"] = f"ProfilerStep#{number}"
    whole = _kineto(tmp_path / "whole.json", events).read_bytes()
    path = tmp_path / ("cut.json.gz" if packed else "cut.json")
    path.write_bytes(gzip.compress(whole)[:-40] if packed else whole[: int(len(whole) * 0.8)])

    trace = import_profiles([path])

    assert "ends in its middle" in trace.remarks[0]
    assert trace.ranks[0].num_events >= 4


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"", "an empty file"),
        ("a.json", b"hello", "is not a Chrome trace"),
        ("a.json", b'{"traceEvents": [{"ph": nonsense}]}', "is damaged"),
        ("a.json.gz", b"not packed", "is damaged"),
        ("a.txt", b"{}", "does not read"),
        ("a.json", b'{"traceEvents": []}', "where steps begin"),
    ],
)
def test_files_that_are_no_traces_end_in_a_sentence(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ProfileError, match=says) as error:
        import_profiles([path])
    assert name in str(error.value)


def test_all_unreadable_files_are_told_at_once(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text("hello")

    with pytest.raises(MistakeList) as error:
        import_profiles([tmp_path])
    assert len(error.value.errors) == 2
    with pytest.raises(ProfileError, match="does not exist"):
        import_profiles([tmp_path / "missing"])
    with pytest.raises(ProfileError, match="holds no profile"):
        import_profiles([_folder(tmp_path / "empty")])


def _mindspore(folder: Path, *, rank: int, steps: int = 3) -> Path:
    operators = [
        ("Default/net-Net/conv-Conv2d/Conv2D-op0", 0, 0.2),
        ("Gradients/Default/net-Net/conv-Conv2d/Grad_Conv2D/Conv2DBackpropFilter-op1", 200_000, 0.3),
        ("Default/reducer/AllReduce-op0", 500_000, 0.1),
        ("Default/opt-SGD/SGD-op0", 600_000, 0.05),
    ]
    begin = 1_796_102_117_000_000_000
    lines = []
    for scope, start, length in operators:
        runs = " ".join(f"{begin + start + step * 1_000_000},{length},0" for step in range(steps))
        lines.append(f"{scope};HostCpuOps;{runs} ")
    lines.append(f"Default/once-op0;HostCpuOps;{begin},0.01,0 ")
    path = _folder(folder / "FRAMEWORK") / f"cpu_op_execute_timestamp_{rank}.txt"
    path.write_text("\n".join(lines) + "\n")
    return folder


def test_mindspore_on_a_cpu_gets_its_steps_from_operators_that_repeat(tmp_path: Path) -> None:
    _mindspore(tmp_path / "host_11_ascend_ms", rank=1)
    _mindspore(tmp_path / "host_10_ascend_ms", rank=0)

    trace = import_profiles([tmp_path])

    parts = break_down(trace)
    assert [events.rank for events in trace.ranks] == [0, 1]
    assert parts.step_RS[0, :2] == pytest.approx([1e-3, 1e-3], abs=1e-6)
    assert parts.compute_RS[0, 0] == pytest.approx(0.55e-3, abs=1e-6)
    assert parts.exposed_RS[0, 0] == pytest.approx(0.1e-3, abs=1e-6)
    rows = {(row.name, row.kind) for row in analyse(trace).layers}
    assert ("net.conv", "compute") in rows
    assert ("opt", "optimizer") in rows


def test_damaged_mindspore_profiles_end_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="a single step"):
        import_profiles([_mindspore(tmp_path / "single", rank=0, steps=1)])
    folder = _mindspore(tmp_path / "bad", rank=0)
    (folder / "FRAMEWORK" / "cpu_op_execute_timestamp_0.txt").write_text("Default/a-op0;Host;12,x,0")
    with pytest.raises(ProfileError, match="line 1 is damaged"):
        import_profiles([folder])


SUMS = "Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,Preparing\n"


def _ascend(folder: Path, *, rank: int = 0, kernels: bool = True, computing: float = 600.0) -> Path:
    output = _folder(folder / "ASCEND_PROFILER_OUTPUT")
    (folder / f"profiler_info_{rank}.json").write_text("{}")
    (output / "step_trace_time.csv").write_text(SUMS + f"5,{computing},200,100,300,200,1000,0,0\n")
    if not kernels:
        return folder
    rows = [
        "5,Conv2D-op1,Conv2D,1000,500",
        "5,ApplyMomentum-op1,ApplyMomentum,1700,100",
        "5,hcom_allReduce_,HCOM,1400,300",
    ]
    title = "Step Id,Name,Type,Start Time(us),Duration(us)\n"
    (output / "kernel_details.csv").write_text(title + "\n".join(rows) + "\n")
    times = {"Start Timestamp(us)": 1400.0, "Elapse Time(ms)": 0.3, "Wait Time(ms)": 0.1}
    about = {"Communication Time Info": times, "Communication Bandwidth Info": {"HCCS": {"Transit Size(MB)": 4.0}}}
    communication = {"step5": {"collective": {"hcom_allReduce__1_0_1@77": about, "Total Op Info": about}, "p2p": {}}}
    (output / "communication.json").write_text(json.dumps(communication))
    return folder


def test_an_ascend_profile_is_read_from_its_kernels_and_collectives(tmp_path: Path) -> None:
    trace = import_profiles([_ascend(tmp_path / "host_1_ascend_ms", rank=6)])

    parts = break_down(trace)
    (events,) = trace.ranks
    assert events.rank == 6
    assert parts.compute_RS[0, 0] == pytest.approx(600e-6)
    assert parts.optimizer_RS[0, 0] == pytest.approx(100e-6)
    assert parts.hidden_RS[0, 0] == pytest.approx(100e-6)
    assert parts.exposed_RS[0, 0] == pytest.approx(200e-6)
    assert parts.axes == ("group 77",)
    assert events.num_bytes_E.max() == 4_000_000
    assert trace.remarks == ()


def test_sums_that_differ_from_the_events_are_remarked(tmp_path: Path) -> None:
    trace = import_profiles([_ascend(tmp_path / "host_1_ascend_pt", computing=400.0)])

    assert "compute is 0.6 ms by events and 0.4 ms by step_trace_time.csv" in trace.remarks[0]
    assert trace.engine == "torch"


def test_an_ascend_profile_with_sums_alone_keeps_their_shares(tmp_path: Path) -> None:
    trace = import_profiles([_ascend(tmp_path / "host_1_ascend_ms", kernels=False)])

    parts = break_down(trace)
    assert parts.compute_RS[0, 0] == pytest.approx(600e-6)
    assert parts.hidden_RS[0, 0] == pytest.approx(100e-6)
    assert parts.exposed_RS[0, 0] == pytest.approx(200e-6)
    assert parts.idle_RS[0, 0] == pytest.approx(200e-6)
    assert "only sums" in trace.remarks[0]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("kernel_details.csv", "Name,Type\na,b\n", "no column 'Start Time"),
        ("kernel_details.csv", "Name,Type,Start Time(us),Duration(us)\na,b,x,1\n", "expected a number"),
        ("kernel_details.csv", "Name,Type,Start Time(us),Duration(us)\na,b,1\n", "another number of columns"),
        ("communication.json", "{", "communication.json' is damaged"),
        ("communication.json", '{"step1": {"collective": {"a": {}}}}', "KeyError"),
    ],
)
def test_damaged_ascend_files_end_in_a_sentence(tmp_path: Path, file: str, content: str, says: str) -> None:
    folder = _ascend(tmp_path / "host_1_ascend_ms")
    (folder / "ASCEND_PROFILER_OUTPUT" / file).write_text(content)

    with pytest.raises(ProfileError, match=says):
        import_profiles([folder])


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_a_trace_of_several_engines_names_none(tmp_path: Path) -> None:
    trace = import_profiles(
        [_kineto(tmp_path / "trace.json", _gpu_events(), rank=9), _mindspore(tmp_path / "m", rank=0)]
    )

    assert isinstance(trace, Trace)
    assert trace.engine == ""
