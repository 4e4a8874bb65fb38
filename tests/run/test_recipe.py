"""Recipes: what they resolve to, and errors that name key, line and the nearest right key."""

import pytest

from enfold.errors import EnfoldError
from enfold.run import parse_recipe


def test_short_forms_resolve() -> None:
    recipe = parse_recipe("data: digits\nfolds: [average, {method: distill, alpha: 0.5, plan: {epochs: 2}}]\n")
    assert recipe.data.source == "digits"
    assert [fold.label for fold in recipe.folds] == ["average", "distill"]
    assert recipe.folds[1].settings == {"alpha": 0.5}
    assert recipe.method_plan(recipe.folds[1], seed=4).epochs == 2
    assert recipe.method_plan(recipe.folds[1], seed=4).seed == 4


def test_a_written_recipe_reads_back_equal() -> None:
    text = "members: 2\nseeds: [1, 2]\nplan: {learning_rate: [0.1, 0.2], augment: [flip]}\nfolds: [average]\n"
    recipe = parse_recipe(text)
    assert parse_recipe(recipe.as_yaml()) == recipe
    assert recipe.members_plan(1).learning_rate == (0.1, 0.2)


def test_overrides() -> None:
    recipe = parse_recipe(
        "folds: [{method: distill}]\n", overrides=["plan.epochs=7", "folds.0.alpha=0.25", "data=digits"]
    )
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
        ("members: 0\n", r"line 1: 'members' is wrong: an ensemble must have at least 1 member, got '0'"),
        ("folds: [distil]\n", r"line 1: there is no fold 'distil', did you mean 'distill'"),
        ("folds: [{method: distill, alfa: 1}]\n", r"'distill' has no setting 'alfa', did you mean 'alpha'"),
        ("folds: [{method: distill, alpha: 2}]\n", r"alpha must be in \[0, 1\], got 2"),
        ("folds: [average, average]\n", r"every share and fold must have its own label, got 'average' twice"),
        ("sizes: [9]\n", r"sizes must lie between 1 and the 4 members, got 9"),
        ("data: {sources: x}\n", r"there is no key 'sources', did you mean 'source'"),
        ("seeds: [1, 1]\n", r"every seed must be given once"),
        ("folds: [{method: average, label: a/b}]\n", r"a label must be letters"),
        ("members: 3\nplan: {learning_rate: [0.1, 0.2]}\n", r"must have 3 values, got 2"),
        ("members: 2\nplan: {learning_rate: [0.1, 0.2]}\nfolds: [distill]\n", r"must have 1 values, got 2"),
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
