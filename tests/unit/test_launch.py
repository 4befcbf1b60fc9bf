"""Watching ranks: with stand-ins for ranks that end in every way a rank can."""

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

from convmesh.errors import LaunchError
from convmesh.training.launch import LaunchPlan, free_port, launch, threads_per_rank
from convmesh.training.processes import wait_for_an_end
from convmesh.training.run_folder import RunFolder

# A launcher that starts one process per argument; each runs its argument as code with `rank`, `note` and `die` at hand.
LAUNCHER = """
import subprocess, sys
logs, *codes = sys.argv[1:]
prelude = '''
import json, os, signal, sys, time
rank, logs = int(sys.argv[2]), sys.argv[3]
def note(kind, text=""):
    path = f"{logs}/rank_{rank}.{kind}"
    open(path + ".partial", "w").write(text); os.rename(path + ".partial", path)
def fail(code, kind, message):
    note("error", json.dumps({"time": time.time(), "code": code, "type": kind, "message": message}))
    note("done", str(code)); sys.exit(code)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def wait_for(other, kind):
    while not os.path.exists(f"{logs}/rank_{other}.{kind}"): time.sleep(0.02)
note("pid", str(os.getpid()))
'''
ranks = [subprocess.Popen([sys.executable, "-c", prelude + code, "convmesh.training.worker", str(rank), logs],
                          start_new_session=True) for rank, code in enumerate(codes)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.fixture
def start(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()

    def start(*codes, **rest):
        command = (sys.executable, "-c", LAUNCHER, str(folder.logs), *codes)
        launch(LaunchPlan(command=command, environment={}, num_ranks=len(codes)), folder=folder, **rest)

    yield start
    for path in folder.logs.glob("rank_*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(path.read_text())).status() == psutil.STATUS_ZOMBIE, f"{path.stem} is alive"


DONE = "note('done', '0')"
STUCK = "time.sleep(100)"


def test_all_done(start):
    start(DONE, DONE)


def test_a_killed_rank_ends_all_and_is_named(start):
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 died without a word"):
        start(STUCK, "time.sleep(0.5); die()")
    assert time.monotonic() - begun < 30


def test_a_wait_ends_with_the_first_process_that_ends():
    lasting, ending = (subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({s})"]) for s in (300, 0.3))
    begun = time.monotonic()
    wait_for_an_end([lasting.pid, ending.pid], seconds=200)
    assert time.monotonic() - begun < 100
    assert ending.wait() == 0
    assert lasting.poll() is None
    lasting.kill()
    lasting.wait()
    wait_for_an_end([lasting.pid], seconds=200)
    assert time.monotonic() - begun < 100


def test_the_first_cause_is_told_not_its_consequence(start):
    with pytest.raises(LaunchError, match="rank 1 died without a word"):
        start(
            "wait_for(1, 'pid'); time.sleep(0.3); fail(1, 'RuntimeError', 'gloo: Connection closed by peer')", "die()"
        )


def test_a_user_mistake_on_one_rank_is_its_sentence(start):
    with pytest.raises(LaunchError, match=r"rank 0: file x is corrupt\.") as caught:
        start("fail(2, 'DataError', 'file x is corrupt.')", STUCK)
    assert caught.value.exit_code == 2


def test_the_rank_that_failed_itself_is_told_not_the_one_that_heard_of_it(start):
    with pytest.raises(LaunchError, match="rank 1: disk full"):
        start("wait_for(1, 'error'); fail(2, 'OtherRankError', 'rank 1 failed')", "fail(2, 'DataError', 'disk full')")


def test_a_crash_names_the_log(start):
    with pytest.raises(LaunchError, match=r"ZeroDivisionError: x. Its log is .*rank_1\.log"):
        start(STUCK, "fail(1, 'ZeroDivisionError', 'ZeroDivisionError: x')")


@pytest.mark.parametrize("saved", [False, True])
def test_a_killed_rank_goes_on_only_where_a_checkpoint_is(start, tmp_path, saved):
    if saved:
        (tmp_path / "checkpoints" / "update_00000001").mkdir(parents=True)
        (tmp_path / "checkpoints" / "update_00000001" / "state.json").touch()
    with pytest.raises(LaunchError, match="then go on with --resume" if saved else "then start again"):
        start(STUCK, "time.sleep(0.5); die()")


def test_logs_that_do_not_last_are_told(start, tmp_path):
    (tmp_path / "logs" / "rank_1.log").write_text("said before the end")
    with pytest.raises(LaunchError, match=r"ZeroDivisionError: x .*\n.*said before the end") as caught:
        start(STUCK, "fail(1, 'ZeroDivisionError', 'ZeroDivisionError: x')", lasts=False)
    assert "Its log is" not in str(caught.value)


def test_ranks_that_never_start(start):
    with pytest.raises(LaunchError, match="could not be started"):
        start("os.remove(f'{logs}/rank_0.pid'); sys.exit(3)")


def test_a_taken_port_is_a_sentence(start):
    code = "os.remove(f'{logs}/rank_0.pid'); print('bind: Address already in use', flush=True); sys.exit(3)"
    with pytest.raises(LaunchError, match="taken by another program"):
        start(code)


def test_a_missing_launcher_is_a_sentence(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    with pytest.raises(LaunchError, match="can't be started"):
        launch(LaunchPlan(command=("/nonexistent/torchrun",), environment={}, num_ranks=1), folder=folder)


def test_ports_and_threads():
    assert 1024 < free_port() < 65536
    assert threads_per_rank(10**6) == 1
    assert threads_per_rank(1) == len(os.sched_getaffinity(0))
