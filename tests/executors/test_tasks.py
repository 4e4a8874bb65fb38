"""Tasks: what is done costs nothing, a crash is repeated once, an error never, and memory halves the slots."""

from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor

import pytest

from enfold.errors import EnfoldError
from enfold.executors import Parallel, Store, Task, run_tasks

calls: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls():
    calls.clear()


def write(store, name):
    calls.append(name)
    with store.write(name) as path:
        path.write_text(name)


def fail(store, name):
    calls.append(name)
    raise ValueError("a deterministic error")


def exhaust(store, name):
    calls.append(name)
    if calls.count(name) < 3:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    write(store, name)


def always_exhaust(store, name):
    raise MemoryError


def forget(store, name):
    calls.append(name)


class Crashing(Executor):
    """An executor whose worker ends abruptly the first few times that a task runs."""

    def __init__(self, crashes: int) -> None:
        self.left = crashes

    def submit(self, fn, /, *args, **kwargs):
        found = Future()
        if self.left:
            self.left -= 1
            found.set_exception(BrokenExecutor("the process was killed"))
        else:
            found.set_result(fn(*args, **kwargs))
        return found


def tasks(*names, function=write):
    return [Task(name, name, function, (name,)) for name in names]


def run(given, store, **options):
    return run_tasks(given, store, Parallel(**{"executor": "serial", **options}), title="tasks", quiet=True)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def test_finished_tasks_are_not_run_again(store):
    assert run(tasks("a", "b"), store) == []
    assert run(tasks("a", "b", "c"), store) == []
    assert calls == ["a", "b", "c"]


def test_an_error_is_never_repeated_and_the_others_are_finished(store):
    failures = run([*tasks("a"), *tasks("b", function=fail), *tasks("c")], store)
    assert calls == ["a", "b", "c"]
    assert [(each.task, each.kind, each.message) for each in failures] == [
        ("b", "error", "ValueError: a deterministic error")
    ]
    assert "in fail" in failures[0].details


def test_a_crash_is_repeated_once(store, capsys):
    assert run(tasks("a"), store, executor=Crashing(1)) == []
    assert calls == ["a"]
    assert "a ended abruptly (the process was killed): repeated once" in capsys.readouterr().err


def test_a_second_crash_is_a_failure(store):
    (failure,) = run(tasks("a"), store, executor=Crashing(2))
    assert failure.kind == "crash"
    assert calls == []


def test_exhausted_memory_halves_the_slots(store, capsys):
    with ThreadPoolExecutor(4) as threads:
        assert run(tasks("a", function=exhaust), store, executor=threads) == []
    assert calls.count("a") == 4  # two that fail, a third, and the write
    shown = capsys.readouterr().err
    assert "ran out of memory: repeated with 2 at a time" in shown
    assert "ran out of memory: repeated with 1 at a time" in shown


def test_exhausted_memory_with_one_slot_is_a_failure(store):
    (failure,) = run(tasks("a", function=always_exhaust), store)
    assert failure.kind == "memory"


def test_workers_that_write_elsewhere_are_an_error(store):
    with pytest.raises(EnfoldError, match="all workers must write to one place"):
        run(tasks("a", function=forget), store)


def test_nothing_is_chosen_without_a_measurement(store):
    with pytest.raises(EnfoldError, match="name serial, local or ray"):
        run(tasks("a"), store, executor="auto")


def test_a_user_executor_is_not_shut_down(store):
    with ThreadPoolExecutor(1) as threads:
        run(tasks("a"), store, executor=threads)
        assert threads.submit(int, "1").result() == 1


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"executor": "locl"}, "local"),
        ({"executor": 3}, "executor"),
        ({"workers": 0}, "workers"),
        ({"block_size": 0}, "block_size"),
        ({"executor": "local", "address": "auto"}, "address"),
    ],
)
def test_invalid_options_are_refused_by_name(options, name):
    with pytest.raises(EnfoldError, match=name):
        Parallel(**options)
