"""Recipes: what they resolve to, and errors that name key, line and the nearest right key."""

import pytest

from enfold.errors import EnfoldError
from enfold.run import parse_recipe


def test_short_forms_resolve() -> None:
    recipe = parse_recipe("data: digits\nfolds: [average, {method: kd, alpha: 0.5, plan: {epochs: 2}}]\n")
    assert recipe.data.source == "digits"
    assert [fold.label for fold in recipe.folds] == ["average", "kd"]
    assert recipe.folds[1].settings == {"alpha": 0.5}
    assert recipe.method_plan(recipe.folds[1], seed=4).epochs == 2
    assert recipe.method_plan(recipe.folds[1], seed=4).seed == 4


def test_a_written_recipe_reads_back_equal() -> None:
    text = "members: 2\nseeds: [1, 2]\nplan: {lr: [0.1, 0.2], augment: [flip]}\nfolds: [average]\n"
    recipe = parse_recipe(text)
    assert parse_recipe(recipe.as_yaml()) == recipe
    assert recipe.members_plan(1).lr == (0.1, 0.2)


def test_overrides() -> None:
    recipe = parse_recipe("folds: [{method: kd}]\n", overrides=["plan.epochs=7", "folds.0.alpha=0.25", "data=digits"])
    assert recipe.plan == {"epochs": 7}
    assert recipe.folds[0].settings == {"alpha": 0.25}
    assert recipe.data.source == "digits"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("member: 3\n", r"line 1: there is no key 'member', did you mean 'members'"),
        ("name: x\nplan:\n  batchsize: 3\n", r"line 3: a plan has no key 'batchsize', did you mean 'batch_size'"),
        ("plan: {epochs: many}\n", r"line 1: .*epochs"),
        ("plan: {epochs: -1}\n", r"epochs must be .*0 or more, got -1"),
        ("plan: {optimizer: adamm}\n", r"optimizer"),
        ("plan: {seed: 3}\n", r"set seeds of the run instead of plan.seed"),
        ("members: 0\n", r"line 1: 'members' is wrong: an ensemble must have 1 to 10,000 members, got '0'"),
        ("folds: [kdd]\n", r"line 1: there is no fold 'kdd', did you mean 'kd'"),
        ("folds: [{method: kd, alfa: 1}]\n", r"'kd' has no setting 'alfa', did you mean 'alpha'"),
        ("folds: [{method: kd, alpha: 2}]\n", r"alpha must be in \[0, 1\], got 2"),
        ("folds: [average, average]\n", r"every share and fold must have its own label, got 'average' twice"),
        ("folds: [swag]\n", r"a fold is asked for, but 'swag' is a share: use enfold share RUN swag, or shares: in"),
        ("shares: [kd]\n", r"a share is asked for, but 'kd' is a fold: use enfold fold RUN kd"),
        ("folds: [{method: soup, plan: {epochs: 1}}]\n", r"line 1: 'soup' is not trained by a plan: leave it out"),
        ("sizes: [9]\n", r"sizes must lie between 1 and the 4 members, got 9"),
        ("data: {sources: x}\n", r"there is no key 'sources', did you mean 'source'"),
        ("seeds: [1, 1]\n", r"every seed must be given once"),
        ("folds: [{method: average, label: a/b}]\n", r"a label must be at most 100 letters"),
        ("members: 3\nplan: {lr: [0.1, 0.2]}\n", r"must have 3 values, got 2"),
        ("members: 2\nplan: {lr: [0.1, 0.2]}\nfolds: [kd]\n", r"must have 1 values, got 2"),
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
        ("folds.0.repair=none", "--set 'folds.0={method: average, repair: none}'"),
        ("folds.1.share.rank=2", "--set 'folds.1.share={method: batch_ensemble, rank: 2}'"),
        ("folds.1.then.0.kind=reset", "--set 'folds.1.then.0={method: repair, kind: reset}'"),
        ("members.x=3", "but members is 4: set members itself"),
        ("name.x=3", "but name is 'run': set name itself"),
        ("folds.2.repair=none", "but folds is a list of 2: choose a place from 0 to 1"),
        ("folds.first.repair=none", "but folds is a list of 2: choose a place from 0 to 1"),
        ("shares.0=swag", "but shares is an empty list: set shares itself"),
    ],
)
def test_an_override_that_has_no_place_is_told_another(override: str, remedy: str) -> None:
    text = (
        "name: run\nmembers: 4\nnetwork: mlp\ndata: digits\nood: [mnist]\nshares: []\n"
        "folds: [average, {method: kd, share: batch_ensemble, then: [repair]}]\n"
    )
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(text, overrides=[override])
    assert f"got '{override}', {remedy}" in str(raised.value) or str(raised.value).endswith(remedy)
    assert "\n" not in str(raised.value)


SHARE = "name: x\nshares:\n  - method: METHOD\n    label: mine\n    LINE\n"


@pytest.mark.parametrize(
    ("method", "line", "says"),
    [
        ("mixture_ensemble", "budget: lots", "line 5: 'budget' of share 'mine' must be a number, got 'lots'"),
        ("batch_ensemble", "rank: 1.5", "line 5: 'rank' of share 'mine' must be a whole number, got '1.5'"),
        ("lora_ensemble", "frozen: 7", "line 5: 'frozen' of share 'mine' must be true or false, got '7'"),
        ("batch_ensemble", "include: 3", "line 5: 'include' of share 'mine' must be a list, got '3'"),
        ("batch_ensemble", "include: [3]", "line 5: value 1 of 'include' of share 'mine' must be text, got '3'"),
        ("papa", "kind: al", "line 5: 'kind' of share 'mine' must be one of 'gradual', 'all', 'pairs', got 'al'"),
        (
            "batch_ensemble",
            "from_member: warm",
            "line 5: 'from_member' of share 'mine' must be true or false, got 'warm'",
        ),
        ("batch_ensemble", "network: 3", "line 5: 'network' of share 'mine' must be text or a mapping, got '3'"),
        (
            "batch_ensemble",
            "plan: {epochs: many}",
            "line 5: 'epochs' of the plan of share 'mine' must be a whole number,",
        ),
        ("batch_ensemble", "from_membr: true", "has no setting 'from_membr', did you mean 'from_member'?"),
        ("batch_ensemble", "netwrk: mlp", "has no setting 'netwrk', did you mean 'network'?"),
        ("batch_ensemble", "plans: {}", "has no setting 'plans', did you mean 'plan'?"),
        ("batch_ensemble", "labels: x", "has no setting 'labels', did you mean 'label'?"),
    ],
)
def test_a_wrong_setting_of_a_share_is_one_sentence(method: str, line: str, says: str) -> None:
    with pytest.raises(EnfoldError) as raised:
        parse_recipe(SHARE.replace("METHOD", method).replace("LINE", line), "r.yaml")
    assert str(raised.value).startswith("r.yaml, line ")
    assert says in str(raised.value)
    assert str(raised.value).count("got") <= 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("members: several\n", "r.yaml, line 1: 'members' must be a whole number, got 'several'"),
        ("name: x\ndata: {seed: one}\n", "r.yaml, line 2: 'seed' of data must be a whole number, got 'one'"),
        ("plan: {epochs: many}\n", "r.yaml, line 1: 'epochs' of the plan must be a whole number, got 'many'"),
        ("shares: [{label: x}]\n", "r.yaml, line 1: 'method' of share 'x' must be given"),
        ("seeds: [1, x]\n", "r.yaml, line 1: value 2 of 'seeds' must be a whole number, got 'x'"),
        ("shares: 3\n", "r.yaml, line 1: 'shares' must be a list, got '3'"),
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
        parse_recipe(f"data: digits\nplan: {{lr: {text}}}"),
        parse_recipe("data: digits", overrides=[f"plan.lr={text}"]),
    ):
        assert made.plan["lr"] == 0.001
        assert parse_recipe(made.as_yaml()).plan == made.plan


def test_text_that_looks_like_a_number_stays_text() -> None:
    made = parse_recipe("data: digits\nname: '1e3'")
    assert made.name == parse_recipe(made.as_yaml()).name == "1e3"


def test_a_number_in_quotes_says_what_to_do() -> None:
    with pytest.raises(EnfoldError, match=r"'lr' of the plan must not be text, got '0.001': leave out the qu"):
        parse_recipe("data: digits", overrides=["plan.lr='0.001'"])
