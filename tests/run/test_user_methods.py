"""Methods of the user in runs: changed files, exceptions, wrong results, missing options, and where errors are."""

from pathlib import Path

import pytest
import yaml

from enfold.run import read_recipe

MINE = '''
import torch
from torch import nn
from enfold import DeepEnsemble, DistillationLoss, KD, Perturbation


def one_member(models, *, index: int, times: int = 1):
    """Return a member."""
    return models.member(index * times)


def fails(models):
    return [][3]


def returns_nothing(models):
    return None


def returns_nan(models, *, count: int = 0):
    state = models.mean_state()
    return models.network({name: value / count if "weight" in name else value for name, value in state.items()})


def returns_another(models):
    return nn.Linear(2, 2)


class FailingEnsemble(DeepEnsemble):
    def __init__(self, network, num_members: int = 2):
        raise KeyError("nothing")


class WrongEnsemble(DeepEnsemble):
    def __init__(self, network, num_members: int = 2):
        super().__init__(network, num_members)
    def on_step_end(self, step, optimizer):
        torch.ones(2) @ torch.ones(3)


class StandingStill(Perturbation):
    def __init__(self, scale: float):
        self.scale = scale
    def __call__(self, inputs, *others):
        return inputs
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def line_of(text: str) -> int:
    return MINE.splitlines().index(text) + 1


def changed(file: Path) -> None:
    file.write_text(f"{MINE}\n# something else\n")


# Changed files


def test_a_changed_file_is_refused_by_every_verb_until_it_is_restored(enfold, mine, recipe_file, tmp_path):
    content = yaml.safe_load(recipe_file.read_text())
    content["steps"] = [{"method": "mine.py:one_member", "label": "one", "index": 1}]
    recipe_file.write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    assert enfold("run", recipe_file, out, "--trust-code").code == 0
    changed(mine)
    for words in (["run", recipe_file, out, "--resume"], ["merge", out, "average"], ["evaluate", out]):
        done = enfold(*words, "--trust-code")
        assert (done.code, "mine.py:one_member" in done.err, f"drop {out} one" in done.err) == (2, True, True), done.err
        assert "Traceback" not in done.err
    mine.write_text(MINE)
    assert enfold("merge", out, "average", "--trust-code").code == 0
    changed(mine)
    assert enfold("drop", out, "one").code == 0
    again = ["merge", out, f"{mine}:one_member", "--label", "one", "--set", "index=1", "--trust-code"]
    assert enfold(*again).code == 0
    assert enfold("evaluate", out, "--trust-code").code == 0


def test_members_depend_on_the_file_of_their_network(enfold, small_data, tmp_path):
    nets = tmp_path / "nets.py"
    text = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))\n"
    nets.write_text(text)
    out = tmp_path / "out"
    words = ["train", out, "--data", small_data, "--network", f"{nets}:make", "--set", "train.epochs=1"]
    assert enfold(*words, "--members", 2, "--trust-code").code == 0
    nets.write_text(f"{text}# something else\n")
    done = enfold("merge", out, "average", "--trust-code")
    assert (done.code, f"{nets}:make" in done.err, "members" in done.err) == (2, True, True), done.err


@pytest.mark.slow
def test_an_interrupted_training_does_not_go_on_with_other_code(enfold, interrupted, mine, finished):
    words = ["train", finished, f"{mine}:Slow", "--label", "slow", "--trust-code"]
    mine.write_text(MINE.replace("class WrongEnsemble", "class Slow(DeepEnsemble): pass\nclass WrongEnsemble"))
    text = mine.read_text()
    interrupted(2, *words)
    mine.write_text(f"{text}\n# something else\n")
    done = enfold(*words)
    assert (done.code, f"{mine}:Slow" in done.err) == (2, True), done.err
    mine.write_text(text)
    assert enfold(*words).code == 0


def test_a_failed_step_may_be_corrected(enfold, mine, recipe_file, tmp_path):
    content = yaml.safe_load(recipe_file.read_text())
    recipe_file.write_text(yaml.safe_dump({**content, "steps": ["mine.py:fails"]}))
    out = tmp_path / "out"
    failed = enfold("run", recipe_file, out, "--trust-code")
    assert failed.code == 1
    assert f"enfold drop {out} fails" in failed.err
    mine.write_text(MINE.replace("return [][3]", "return models.member(0)"))
    done = enfold("run", recipe_file, out, "--trust-code", "--resume")
    assert done.code == 0, done.err


# Exceptions and wrong results


@pytest.mark.parametrize(
    ("verb", "name", "error", "line"),
    [
        ("merge", "fails", "IndexError", "    return [][3]"),
        ("train", "FailingEnsemble", "KeyError", '        raise KeyError("nothing")'),
        ("train", "WrongEnsemble", "RuntimeError", "        torch.ones(2) @ torch.ones(3)"),
    ],
)
def test_an_exception_is_one_sentence_with_the_line(enfold, mine, finished, verb, name, error, line):
    before = (finished / "recipe.yaml").read_text()
    done = enfold(verb, finished, f"{mine}:{name}", "--trust-code")
    assert done.code in (1, 2)
    *_, last = done.err.splitlines()
    assert error in last
    assert f"(line {line_of(line)} of {mine})" in last
    assert "Traceback" not in done.err
    assert (finished / "recipe.yaml").read_text() == before


@pytest.mark.parametrize(("name", "got"), [("returns_nothing", "NoneType"), ("returns_another", "Linear")])
def test_a_merge_that_returns_no_network_of_the_members_class_is_refused(enfold, mine, finished, name, got):
    done = enfold("merge", finished, f"{mine}:{name}", "--trust-code")
    assert (done.code, name in done.err, got in done.err) == (2, True, True), done.err
    assert not (finished / "steps" / f"{name}.json").exists()


def test_a_merge_that_returns_weights_without_values_is_named(enfold, mine, finished):
    done = enfold("merge", finished, f"{mine}:returns_nan", "--trust-code")
    assert (done.code, "mine.py:returns_nan' must return finite weights" in done.err) == (2, True), done.err
    assert not (finished / "steps" / "returns_nan.json").exists()
    done = enfold("merge", finished, f"{mine}:returns_nan", "--set", "count=2", "--trust-code")
    assert done.code == 0, done.err


# Options


@pytest.mark.parametrize(
    ("step", "named"),
    [
        ({"method": "mine.py:one_member", "label": "one"}, "'index'"),
        ({"method": "mine.py:one_member", "index": "x"}, "index must be"),
        ({"method": "mine.py:one_member", "index": 1, "tims": 2}, "did you mean 'times'"),
        ({"method": "kd", "perturb": "mine.py:StandingStill"}, "'scale'"),
        ({"method": "mine.py:one_membr", "index": 1}, "mine.py:one_member"),
    ],
)
def test_options_are_checked_before_anything_is_trained_with_their_line(
    enfold, mine, recipe_file, tmp_path, step, named
):
    text = recipe_file.read_text()
    recipe_file.write_text(f"{text[: text.index('steps:')]}steps:\n  - {yaml.safe_dump(step, default_flow_style=True)}")
    done = enfold("run", recipe_file, tmp_path / "out", "--trust-code")
    assert (done.code, named in done.err) == (2, True), done.err
    assert f"{recipe_file}, line {recipe_file.read_text().count(chr(10))}: " in done.err
    assert not (tmp_path / "out").exists()


# Trust


def test_all_code_is_listed_before_any_of_it_is_imported(enfold, mine, recipe_file, tmp_path):
    mine.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    content = yaml.safe_load(recipe_file.read_text())
    for number in "ab":
        (tmp_path / f"{number}.py").write_text(mine.read_text())
    recipe_file.write_text(
        yaml.safe_dump({**content, "network": "a.py:make", "steps": ["mine.py:one_member", "b.py:another"]})
    )
    done = enfold("run", recipe_file, tmp_path / "out")
    assert done.code == 2
    assert all(f"({tmp_path / name}.py)" in done.err for name in ("a", "mine", "b")), done.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_report_does_not_import_a_perturbation(enfold, finished, tmp_path):
    (finished / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    recipe = finished / "recipe.yaml"
    steps = [{"method": "kd", "label": "one", "family": "distill", "perturb": f"{finished}/evil.py:Evil"}]
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), "steps": steps}))
    enfold("report", finished)
    assert not (tmp_path / "ran").exists()


# Places of overrides


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.epochs=-1", "epochs"),
        ("train.lr=x", "lr"),
        ("train.epoch=3", "'epochs'"),
        ("train.warmup_epochs=99", "warmup_epochs"),
        ("steps.1.temperature=0", "temperature"),
        ("steps.-1.tempratur=2", "temperature"),
        ("epochs=3", "train.epochs"),
        ("members=0", "members"),
    ],
)
def test_an_error_of_an_override_cites_the_override(enfold, recipe_file, tmp_path, override, named):
    done = enfold("run", recipe_file, tmp_path / "out", "--set", override)
    assert (done.code, done.err.startswith(f"enfold: --set {override}: ")) == (2, True), done.err
    assert named in done.err.partition(f"--set {override}: ")[2]


def test_an_error_of_an_override_of_a_new_step_cites_it_too(enfold, finished):
    done = enfold("distill", finished, "kd", "--label", "other", "--set", "temperature=0")
    assert (done.code, "--set temperature=0: temperature" in done.err) == (2, True), done.err
    done = enfold("distill", finished, "kd", "--label", "other", "--set", "epochs=1")
    assert (done.code, "train.epochs" in done.err) == (2, True), done.err


def test_a_training_setting_at_the_top_of_a_recipe_is_named(enfold, recipe_file):
    recipe_file.write_text(recipe_file.read_text() + "batch_size: 3\n")
    from enfold.errors import EnfoldError

    with pytest.raises(EnfoldError, match=r"train\.batch_size"):
        read_recipe(recipe_file)
