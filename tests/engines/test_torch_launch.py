"""How ranks of PyTorch are started and what is refused; needs no torch."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from convmesh.config.schema import DataConfig, ModelConfig, RunConfig
from convmesh.engines import load_launcher
from convmesh.engines.contract import LaunchRequest
from convmesh.engines.torch import launch

LAUNCHER = load_launcher("torch")


def run_of(weights: str | None = None) -> RunConfig:
    return RunConfig(
        engine="torch", model=ModelConfig(name="cnn-small", weights=weights), data=DataConfig(source="digits")
    )


def test_the_command_is_torchrun_on_our_port() -> None:
    request = LaunchRequest(num_ranks=3, port=12345, log_dir=Path("logs"), command=(sys.executable, "-c", "pass"))
    command = LAUNCHER.command(request)
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc-per-node=3", "--master-port=12345", "--max-restarts=0", "--no-python"} <= set(command)
    assert tuple(command[-3:]) == request.command


def test_the_environment_binds_ranks_to_loopback_and_their_threads() -> None:
    environment = LAUNCHER.environment(num_threads=5)
    assert environment["OMP_NUM_THREADS"] == "5"
    assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone keeps freed memory")
def test_freed_memory_is_kept_in_this_process_too() -> None:
    code = (
        "import ctypes, os, sys; os.environ.pop('MALLOC_TRIM_THRESHOLD_', None)\n"
        "from convmesh.engines.torch.launch import keep_freed_memory\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "def use():\n"
        "    blocks = [ctypes.create_string_buffer(2**23) for _ in range(8)]\n"
        "kept = keep_freed_memory() if sys.argv[1] == 'keep' else None\n"
        "before = resident(); use(); print(kept, (resident() - before) // 2**20)"
    )
    told = {
        way: subprocess.run(
            [sys.executable, "-c", code, way], check=True, capture_output=True, text=True
        ).stdout.split()
        for way in ("keep", "leave")
    }
    assert told["keep"][0] == "True"
    assert int(told["keep"][1]) >= 60
    assert int(told["leave"][1]) < 4


def test_launching_imports_no_torch() -> None:
    code = (
        "import sys; from convmesh.engines import load_launcher; load_launcher('torch').resolve_device('auto');"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cpu_run_has_no_mistakes() -> None:
    assert LAUNCHER.check(run_of(), device="cpu", num_ranks=64) == []


def test_devices_that_pytorch_lacks_are_refused() -> None:
    (error,) = LAUNCHER.check(run_of(), device="ascend", num_ranks=1)
    assert "engine: mindspore" in str(error)


@pytest.mark.parametrize(("num_gpus", "text"), [(0, "no CUDA GPU"), (2, "3 ranks, 2 GPUs")])
def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, num_gpus: int, text: str) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: False)
    monkeypatch.setattr(launch, "count_gpus", lambda: num_gpus)
    (error,) = LAUNCHER.check(run_of(), device="cuda", num_ranks=3)
    assert text in str(error)


def test_a_cpu_build_can_not_use_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_cpu_build", lambda: True)
    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    assert LAUNCHER.resolve_device("auto") == "cpu"
    (error,) = LAUNCHER.check(run_of(), device="cuda", num_ranks=1)
    assert "CUDA build" in str(error)


def test_gpus_are_counted_by_what_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(launch, "Path", lambda _: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch.count_gpus() == 3
    for visible, expected in (("0,2", 2), ("", 0), ("1,-1,2", 1), ("0,1,2,3,4", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert launch.count_gpus() == expected


def test_weights_that_are_missing_or_of_another_kind_are_named(tmp_path: Path) -> None:
    (missing,) = LAUNCHER.check(run_of(str(tmp_path / "none.pth")), device="cpu", num_ranks=1)
    (kind,) = LAUNCHER.check(run_of(str(tmp_path / "weights.ckpt")), device="cpu", num_ranks=1)
    assert "none.pth" in str(missing)
    assert ".safetensors" in str(kind)
