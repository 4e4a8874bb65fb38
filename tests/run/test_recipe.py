"""Recipes: what they resolve to, and errors that name key, line and the nearest valid key."""

import pytest

from enfold.errors import EnfoldError
from enfold.run import parse_recipe


def test_short_forms_resolve() -> None:
    recipe = parse_recipe("data: digits\nsteps: [average, {method: kd, alpha: 0.5, train: {epochs: 2}}]\n")
    assert recipe.data.source == "digits"
    assert [(step.label, step.family) for step in recipe.steps] == [("average", "merge"), ("kd", "distill")]
    assert recipe.steps[1].options == {"alpha": 0.5}
    assert recipe.step_config(recipe.steps[1], seed=4).epochs == 2
    assert recipe.step_config(recipe.steps[1], seed=4).seed == 4


def test_a_written_recipe_reads_back_equal() -> None:
    text = "members: 2\nseeds: [1, 2]\ntrain: {lr: [0.1, 0.2], augment: [flip]}\nsteps: [average, {method: swag}]\n"
    recipe = parse_recipe(text)
    assert parse_recipe(recipe.as_yaml()) == recipe
    assert recipe.members_config(1).lr == (0.1, 0.2)


def test_overrides() -> None:
    recipe = parse_recipe("steps: [{method: kd}]\n", overrides=["train.epochs=7", "steps.0.alpha=0.25", "data=digits"])
    assert recipe.train == {"epochs": 7}
    assert recipe.steps[0].options == {"alpha": 0.25}
    assert recipe.data.source == "digits"


CHAIN = """
train: {epochs: 10}
steps:
  - {method: batch_ensemble, rank: 2}
  - {method: weight_matching, label: matched}
  - {method: repair, init: matched, label: repaired}
  - {method: kd, init: repaired, label: once, train: {epochs: 8}, teacher: batch_ensemble}
  - {method: kd, init: once, label: twice}
  - {method: kd, label: plain, train: {epochs: 18}}
  - {method: kd, init: matched, label: other, train: {epochs: 8, lr: 0.5}}
"""


def test_a_control_trains_as_long_as_the_chain_of_steps() -> None:
    recipe = parse_recipe(CHAIN)
    lengths = {name: config.epochs for name, config in recipe.controls(0).items()}
    assert lengths == {"control": 8, "control-2": 18, "control-3": 8}
    assert recipe.find_controls() == {
        "once": "control",
        "twice": "control-2",
        "plain": "control-2",
        "other": "control-3",
    }
    assert [step.label for step in recipe.chain(recipe.step("twice"))] == ["matched", "repaired", "once", "twice"]
    assert recipe.dependencies(recipe.step("once")) == ["repaired", "batch_ensemble"]
    assert recipe.closure(["twice"]) == {"matched", "repaired", "once", "twice", "batch_ensemble"}


def test_an_option_called_init_belongs_to_the_ensemble() -> None:
    step = parse_recipe("steps: [{method: batch_ensemble, init: signs, network: best_member}]").steps[0]
    assert step.options == {"init": "signs"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("member: 3\n", r"line 1: there is no key 'member', did you mean 'members'"),
        (
            "name: x\ntrain:\n  batchsize: 3\n",
            r"line 3: there is no training setting 'batchsize', did you mean 'batch_size'",
        ),
        ("train: {epochs: many}\n", r"line 1: .*epochs"),
        ("train: {epochs: -1}\n", r"'epochs' .*0, got '-1'"),
        ("train: {optimizer: adamm}\n", r"optimizer"),
        ("train: {seed: 3}\n", r"set seeds of the run instead of train.seed"),
        ("members: 0\n", r"line 1: 'members' is not valid: an ensemble must have 1 to 10,000 members, got '0'"),
        ("steps: [kdd]\n", r"line 1: there is no method 'kdd', did you mean 'kd'"),
        ("steps: [{method: kd, alfa: 1}]\n", r"'kd' has no option 'alfa', did you mean 'alpha'"),
        ("steps: [{method: kd, alpha: 2}]\n", r"alpha must be .*got 2"),
        ("steps: [average, average]\n", r"every step must have its own label, got 'average' twice"),
        ("steps: [{method: swag, family: merge}]\n", r"'swag' is of the kind ensemble"),
        ("steps: [mixup]\n", r"perturb: mixup"),
        ("steps: [{method: soup, train: {epochs: 1}}]\n", r"line 1: 'soup' does not train: remove train"),
        ("steps: [{method: swag, teacher: x}]\n", r"'teacher' is a key of distill steps"),
        ("steps: [{method: average, student: mlp}]\n", r"'student' is a key of distill steps"),
        ("steps: [{method: kd, init: later}, {method: average, label: later}]\n", r"init must be .*got 'later'"),
        ("steps: [swag, {method: kd, init: swag}]\n", r"init must be .*one network.*got 'swag'"),
        ("steps: [{method: kd, teacher: nowhere}]\n", r"teacher must be .*got 'nowhere'"),
        ("plan: {epochs: 1}\n", r"line 1: there is no key 'plan', use 'train'"),
        ("name: x\nfolds: [kd]\n", r"line 2: there is no key 'folds', use 'steps'"),
        ("sizes: [9]\n", r"sizes must be from 1 to the 4 members, got 9"),
        ("data: {sources: x}\n", r"there is no key 'sources', did you mean 'source'"),
        ("seeds: [1, 1]\n", r"every seed must be given once"),
        ("steps: [{method: average, label: a/b}]\n", r"a label must be at most 100 letters"),
        ("members: 3\ntrain: {lr: [0.1, 0.2]}\n", r"3 members, got 2"),
        ("members: 2\ntrain: {lr: [0.1, 0.2]}\nsteps: [kd]\n", r"1 members, got 2"),
        ("a: [\n", r"must be YAML"),
        ("", r"must be a mapping"),
        ("- 1\n", r"must be a mapping"),
    ],
)
def test_errors_name_the_place_and_the_remedy(text: str, says: str) -> None:
    with pytest.raises(EnfoldError, match=says) as raised:
        parse_recipe(text, "r.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("override", ["epochs", "=3", "name.x=3"])
def test_wrong_overrides(override: str) -> None:
    with pytest.raises(EnfoldError):
        parse_recipe("name: run\n", overrides=[override])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("network.widths=[32,32]", "but network is 'mlp': write  --set 'network={name: mlp, widths: [32, 32]}'"),
        ("network.options.bias=false", "--set 'network={name: mlp, options: {bias: false}}'"),
        ("data.train_size=100", "but data is 'digits': write  --set 'data={source: digits, train_size: 100}'"),
        ("ood.0.size=8", "but ood.0 is 'mnist': write  --set 'ood.0={source: mnist, size: 8}'"),
        ("steps.0.repair=none", "--set 'steps.0={method: average, repair: none}'"),
        ("steps.1.perturb.step=2", "--set 'steps.1.perturb={method: ods, step: 2}'"),
        ("members.x=3", "but members is 4: set members itself"),
        ("name.x=3", "but name is 'run': set name itself"),
        ("steps.2.repair=none", "but steps is a list of 2: choose a place from 0 to 1"),
        ("steps.first.repair=none", "but steps is a list of 2: choose a place from 0 to 1"),
        ("sizes.0=2", "but sizes is an empty list: set sizes itself"),
    ],
)
def test_an_invalid_override_suggests_another(override: str, remedy: str) -> None:
    text = (
        "name: run\nmembers: 4\nnetwork: mlp\ndata: digits\nood: [mnist]\nsizes: []\n"
        "steps: [average, {method: kd, perturb: ods}]\n"
    )
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(text, overrides=[override])
    assert f"got '{override}', {remedy}" in str(raised.value) or str(raised.value).endswith(remedy)
    assert "\n" not in str(raised.value)


STEP = "name: x\nsteps:\n  - method: METHOD\n    label: mine\n    LINE\n"


@pytest.mark.parametrize(
    ("method", "line", "says"),
    [
        ("mixture_ensemble", "budget: lots", "line 5: budget must be"),
        ("batch_ensemble", "rank: 1.5", "line 5: rank must be"),
        ("batch_ensemble", "rank: 0", "line 5: rank must be"),
        ("lora_ensemble", "frozen: 7", "line 5: frozen must be"),
        ("batch_ensemble", "include: 3", "line 5: include must be"),
        ("batch_ensemble", "include: [3]", "line 5: include must be"),
        ("papa", "kind: al", 'line 5: kind must be one of "gradual", "all", "pairs", got \'al\''),
        ("batch_ensemble", "network: 3", "line 5: 'network' of step 'mine' must be text or a mapping, got '3'"),
        ("batch_ensemble", "train: {epochs: many}", "line 5: 'epochs' of train of step 'mine' must be an integer,"),
        ("batch_ensemble", "netwrk: mlp", "line 5: 'batch_ensemble' has no option 'netwrk', did you mean 'network'?"),
        ("batch_ensemble", "trains: {}", "has no option 'trains', did you mean 'train'?"),
        ("batch_ensemble", "labels: x", "has no option 'labels', did you mean 'label'?"),
    ],
)
def test_a_wrong_option_of_a_step_is_one_sentence(method: str, line: str, says: str) -> None:
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(STEP.replace("METHOD", method).replace("LINE", line), "r.yaml")
    assert str(raised.value).startswith("r.yaml, line ")
    assert says in str(raised.value)
    assert str(raised.value).count("got") <= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("members: several\n", "r.yaml, line 1: 'members' must be an integer, got 'several'"),
        ("name: x\ndata: {seed: one}\n", "r.yaml, line 2: 'seed' of data must be an integer, got 'one'"),
        ("train: {epochs: many}\n", "r.yaml, line 1: 'epochs' of train must be an integer, got 'many'"),
        ("steps: [{label: x}]\n", "r.yaml, line 1: 'method' of step 'x' must be given"),
        ("seeds: [1, x]\n", "r.yaml, line 1: value 2 of 'seeds' must be an integer, got 'x'"),
        ("steps: 3\n", "r.yaml, line 1: 'steps' must be a list, got '3'"),
        ("sizes: [true]\n", "r.yaml, line 1: value 1 of 'sizes' must be an integer, got 'True'"),
        ("data: {train_size: true}\n", "r.yaml, line 1: 'train_size' of data must be a number, got 'True'"),
        ("data: {seed: 2.0}\n", "r.yaml, line 1: 'seed' of data must be an integer, got '2.0'"),
        ("train: {epochs: 1e20}\n", "r.yaml, line 1: 'epochs' of train must be an integer, got '1e+20'"),
    ],
)
def test_a_value_of_another_type_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(text, "r.yaml")
    assert str(raised.value) == says


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "0.1e-2", ".1e-2"])
def test_numbers_are_written_as_in_python(text: str) -> None:
    """YAML 1.1 reads 1e-3 as text."""
    for made in (
        parse_recipe(f"data: digits\ntrain: {{lr: {text}}}"),
        parse_recipe("data: digits", overrides=[f"train.lr={text}"]),
    ):
        assert made.train["lr"] == 0.001
        assert parse_recipe(made.as_yaml()).train == made.train


def test_text_that_looks_like_a_number_stays_text() -> None:
    made = parse_recipe("data: digits\nname: '1e3'")
    assert made.name == parse_recipe(made.as_yaml()).name == "1e3"


def test_a_number_in_quotes_says_what_to_do() -> None:
    with pytest.raises(EnfoldError, match=r"'lr' of train must be a number, got the text '0.001': remove the qu"):
        parse_recipe("data: digits", overrides=["train.lr='0.001'"])


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("train: {epochs: 100000000000000000000}\n", "'epochs' of train"),
        ("train: {lr: .inf}\n", "'lr' of train"),
        ("train: {milestones: [30, 60]}\n", "'milestones' of train"),
        ("data: {size: -3}\n", "'size' of data"),
        ("seeds: [true]\n", "'seeds'"),
        ("trajectory: {every: 0}\n", "'trajectory'"),
        ("ood: [noise]\n", "'ood' is not valid: noise must have a kind"),
        ("ood: [{noise: uniform, examples: 100000000000000000000}]\n", "'ood'"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(text, "r.yaml")
    assert str(raised.value).startswith("r.yaml, line 1: ")
    assert field in str(raised.value)
    assert "\n" not in str(raised.value)
