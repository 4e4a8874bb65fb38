import sys
from pathlib import Path

import pytest

from enfold.errors import EnfoldError, UserCodeError
from enfold.io.usercode import code_digest, reporting, resolve


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_function_of_an_installed_module():
    assert resolve("math:sqrt")(9) == 3


def test_a_dotted_name():
    assert resolve("pathlib:Path.home") == Path.home


def test_a_module_in_the_current_folder(here):
    (here / "my_nets_here.py").write_text("def make(): return 42")
    assert resolve("my_nets_here:make")() == 42
    assert str(here) not in sys.path


def test_a_file_may_import_its_neighbour_and_use_dataclasses(here):
    (here / "deep").mkdir()
    (here / "deep" / "neighbour_of_it.py").write_text("VALUE = 7")
    (here / "deep" / "own.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from neighbour_of_it import VALUE\n"
        "@dataclass\n"
        "class Net:\n    width: int = VALUE\n"
    )
    assert resolve("deep/own.py:Net")().width == 7
    assert str(here / "deep") not in sys.path


def test_a_file_is_executed_once_until_it_is_edited(here):
    (here / "own.py").write_text("class Net: pass")
    first = resolve("own.py:Net")
    assert resolve(f"{here}/own.py:Net") is first
    (here / "own.py").write_text("class Net: depth = 2")
    assert resolve("own.py:Net").depth == 2


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("make_net", "module:name"),
        ("own.py:", "module:name"),
        (":make", "module:name"),
        ("absent.py:make", r"absent\.py"),
        ("absent_module:make", "absent_module"),
        ("absent_package.module:make", r"absent_package\.module"),
        ("math:nothing", "'math' must define 'nothing', got .*sqrt"),
        ("own.py:nothing", r"'own\.py' must define 'nothing', got make"),
        ("broken.py:make", r"ZeroDivisionError: division by zero \(line 2 of .*broken\.py\)"),
        ("syntax.py:make", r"SyntaxError: .*\(line 1 of .*syntax\.py\)"),
        ("needs.py:make", "ModuleNotFoundError: No module named 'not_installed_at_all'"),
        ("needs:make", "importing 'needs' must succeed, got ModuleNotFoundError"),
    ],
)
def test_errors_are_one_sentence(here, reference, message):
    (here / "own.py").write_text("def make(): pass")
    (here / "broken.py").write_text("x = 1\n1 / 0")
    (here / "syntax.py").write_text("def make(:")
    (here / "needs.py").write_text("import not_installed_at_all")
    with pytest.raises(EnfoldError, match=message) as caught:
        resolve(reference)
    assert "\n" not in str(caught.value)


def test_a_failing_file_can_be_corrected(here):
    (here / "own.py").write_text("1 / 0")
    before = set(sys.modules)
    with pytest.raises(EnfoldError, match="ZeroDivisionError"):
        resolve("own.py:make")
    assert set(sys.modules) == before
    (here / "own.py").write_text("def make(): return 1")
    assert resolve("own.py:make")() == 1


def test_only_what_a_file_defines_itself_is_offered(here):
    (here / "own.py").write_text("from pathlib import Path\nimport sys\nvalue = 3\ndef make_net(): pass\n")
    with pytest.raises(EnfoldError, match=r"got make_net: did you mean 'own\.py:make_net'") as caught:
        resolve("own.py:make_nets")
    assert "Path" not in str(caught.value)
    with pytest.raises(EnfoldError, match=r"defines make_net: write own\.py:make_net"):
        resolve("own.py")


def test_the_digest_of_code_follows_the_users_files_only(here):
    (here / "own.py").write_text("import other_file_here")
    (here / "other_file_here.py").write_text("VALUE = 1")
    before = code_digest("own.py:make")
    (here / "other_file_here.py").write_text("VALUE = 2")
    assert code_digest("own.py:make") == before, "files that it imports are not included"
    (here / "own.py").write_text("import other_file_here\n")
    assert code_digest("own.py:make") != before
    assert code_digest("torch.nn:Linear") is None
    assert code_digest("json:loads") is None
    assert code_digest("absent.py:make") is None
    assert "other_file_here" not in sys.modules


def test_exceptions_of_user_code_are_reported_with_the_line(here):
    (here / "own.py").write_text(
        "import torch\ndef fail():\n    torch.ones(2) @ torch.ones(3)\ndef refuse():\n    raise E"
    )
    fail, refuse = resolve("own.py:fail"), resolve("own.py:refuse")
    with (
        pytest.raises(UserCodeError, match=r"^this must run .* RuntimeError: .* \(line 3 of .*own\.py\)"),
        reporting("this"),
    ):
        fail()
    refuse.__globals__["E"] = EnfoldError("as it is")
    with pytest.raises(EnfoldError, match=r"^as it is$"), reporting("this"):
        refuse()
    refuse.__globals__["E"] = MemoryError("as it is")
    with pytest.raises(MemoryError), reporting("this", always=True):
        refuse()
