"""Local processes: their environment is set before they start, they are reused, and a dead one is replaced."""

import operator
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, wait

import pytest
import torch

from enfold.executors import LocalExecutor
from enfold.executors.parallel import count_cpus


@pytest.fixture(scope="module")
def executor():
    with LocalExecutor(1, threads=2, devices=("7",)) as found:
        yield found


def test_threads_and_devices_are_set_when_torch_is_imported(executor, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = dict(os.environ)
    assert executor.submit(os.getenv, "OMP_NUM_THREADS").result() == "2"
    assert executor.submit(torch.get_num_threads).result() == min(2, count_cpus())
    assert executor.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() == "7"
    assert dict(os.environ) == before


def test_a_worker_is_reused(executor):
    processes = {executor.submit(os.getpid).result() for _ in range(3)}
    assert len(processes) == 1
    assert os.getpid() not in processes


def test_an_error_of_a_function_leaves_the_worker(executor):
    process = executor.submit(os.getpid).result()
    with pytest.raises(ZeroDivisionError):
        executor.submit(operator.truediv, 1, 0).result()
    assert executor.submit(os.getpid).result() == process


def test_a_dead_worker_is_replaced(executor):
    process = executor.submit(os.getpid).result()
    with pytest.raises(BrokenExecutor):
        executor.submit(os._exit, 3).result()
    assert executor.submit(os.getpid).result() != process


def test_shutdown_without_waiting_ends_a_working_process():
    executor = LocalExecutor(1)
    process = executor.submit(os.getpid).result()
    sleeping = executor.submit(time.sleep, 600)
    time.sleep(0.2)
    executor.shutdown(wait=False, cancel_futures=True)
    assert wait([sleeping], 10).done
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_worker_ends_with_a_killed_parent():
    script = (
        "import os, time\nfrom enfold.executors import LocalExecutor\n"
        "if __name__ == '__main__':\n    print(LocalExecutor(1).submit(os.getpid).result(), flush=True)\n"
        "    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker is still there")
