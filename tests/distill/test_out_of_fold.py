"""Out-of-fold teachers: each example is answered by members that have not seen it."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import enfold
from enfold import EnfoldError
from enfold.distill.distill import make_objective
from enfold.distill.out_of_fold import OutOfFoldTeacher
from enfold.train.objective import StepContext

SETTINGS = {"epochs": 2, "batch_size": 8, "quiet": True}


class Rows(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@pytest.fixture
def examples():
    source = torch.Generator().manual_seed(0)
    return torch.randn(30, 5, generator=source), torch.randint(3, (30,), generator=source)


@pytest.fixture
def members():
    return enfold.DeepEnsemble(make, 3, seed=1).eval()


def expected(members, inputs, unseen):
    """Return the mean probability of the members that have not seen each example."""
    with torch.no_grad():
        probabilities = torch.softmax(members(inputs), -1)
    return torch.stack([probabilities[unseen[:, n], n].mean(0) for n in range(len(inputs))])


def targets_of(teacher, data, batch_size=8, augment=()):
    config = enfold.TrainConfig(batch_size=batch_size, augment=augment, task="classification")
    objective = make_objective(enfold.KD(), teacher.members, data, config, unseen=teacher.unseen)
    from enfold.data.batches import Order

    for batch in Order(batch_size).batches(data, 0):
        step = objective.for_batch(make(), batch, StepContext())
        yield batch, step.target


@pytest.mark.parametrize("is_mask", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_targets_are_those_of_the_members_that_have_not_seen_an_example(examples, members, is_mask, is_split):
    inputs, labels = examples
    folds = enfold.data.fold_numbers(30, 3)
    seen = torch.rand(3, 30, generator=torch.Generator().manual_seed(2)) < 0.6
    seen[0, seen.all(0)] = False
    teacher = OutOfFoldTeacher(members, seen if is_mask else folds)
    unseen = ~seen if is_mask else folds == torch.arange(3)[:, None]
    train = (inputs, labels) if is_split else Rows(inputs, labels)
    data = enfold.data.convert.as_data(train, batch_size=8, indexed=True)
    found = 0
    for batch, target in targets_of(teacher, data):
        assert torch.equal(batch.inputs, inputs[batch.indices])
        wanted = expected(members, inputs, unseen)[batch.indices]
        torch.testing.assert_close(target[:, :3], wanted)
        found += len(batch)
    assert found == 30


def test_members_of_other_folds_do_not_matter(examples, members):
    folds = torch.zeros(30, dtype=torch.long)
    first = enfold.distill(OutOfFoldTeacher(members, folds), examples, init=make_fixed(), **SETTINGS)
    alone = enfold.distill(members.member(0), examples, init=make_fixed(), **SETTINGS)
    torch.testing.assert_close(first.state_dict(), alone.state_dict())


def make_fixed():
    torch.manual_seed(3)
    return make()


def test_a_dataset_an_interrupted_training_and_a_regression(examples, members, tmp_path):
    folds = enfold.data.fold_numbers(30, 3)
    teacher, rows = OutOfFoldTeacher(members, folds), Rows(*examples)
    complete = enfold.distill(teacher, rows, init=make_fixed(), **SETTINGS)

    def stop(record):
        raise KeyboardInterrupt

    file = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        enfold.distill(teacher, rows, init=make_fixed(), checkpoint=file, on_epoch=stop, **SETTINGS)
    resumed = enfold.distill(teacher, rows, init=make_fixed(), checkpoint=file, **SETTINGS)
    assert all(
        torch.equal(a, b) for a, b in zip(complete.state_dict().values(), resumed.state_dict().values(), strict=True)
    )
    other = OutOfFoldTeacher(members, folds.roll(1))
    with pytest.raises(EnfoldError, match="checkpoint"):
        enfold.distill(other, rows, init=make_fixed(), checkpoint=file, **SETTINGS)
    targets = examples[0][:, :3] * 2
    assert enfold.distill(teacher, (examples[0], targets), task="regression", **SETTINGS) is not None


def test_fit_with_folds_leaves_out_the_fold_of_each_member(examples):
    from enfold.data.batches import Order

    data = enfold.data.convert.as_data(examples)
    folds = enfold.data.fold_numbers(30, 4, seed=5)
    assert sorted(folds.bincount().tolist()) == [7, 7, 8, 8]
    order = Order(6, [0, 1, 2, 3], seed=5, folds=4)
    seen = [set(), set(), set(), set()]
    for epoch in range(8):
        batches = list(order.batches(data, epoch))
        assert len(batches) == order.steps(data.train)
        for batch in batches:
            for member, indices in enumerate(batch.indices):
                seen[member] |= set(indices.tolist())
    for member in range(4):
        assert seen[member] == set((folds != member).nonzero()[:, 0].tolist())


def test_a_member_of_a_cross_validation_is_the_network_trained_alone(examples):
    together = enfold.DeepEnsemble(make, 3, seed=1)
    alone = together.member(1)
    enfold.fit(together, examples, folds=3, **SETTINGS)
    enfold.fit(alone, examples, folds=3, first_member=1, **SETTINGS)
    for one, other in zip(together.member(1).state_dict().values(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


WRONG = {
    "folds must be": lambda m, e: OutOfFoldTeacher(m, torch.full((30,), 3)),
    "folds must be booleans": lambda m, e: OutOfFoldTeacher(m, torch.zeros(2, 30, dtype=torch.bool)),
    "folds must leave": lambda m, e: OutOfFoldTeacher(m, torch.ones(3, 30, dtype=torch.bool)),
    "OutOfFoldTeacher answers": lambda m, e: distill(m, (e[0][:20], e[1][:20])),
    "OutOfFoldTeacher loader": lambda m, e: distill(m, DataLoader(Rows(*e), batch_size=8)),
    "loss": lambda m, e: distill(m, e, loss=enfold.OneToOne()),
    "perturb": lambda m, e: distill(m, e, perturb=enfold.Mixup()),
    "folds needs": lambda m, e: enfold.fit(m, e, folds=3, order="shared", **SETTINGS),
    "folds None": lambda m, e: enfold.fit(m, e, folds=3, bootstrap=True, **SETTINGS),
}


def distill(members, train, **options):
    return enfold.distill(OutOfFoldTeacher(members, torch.arange(30) % 3), train, **options, **SETTINGS)


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_refused(words, members, examples):
    with pytest.raises(EnfoldError, match=words.split()[0]):
        WRONG[words](members, examples)


def test_noise_is_allowed(members, examples):
    assert isinstance(distill(members, examples, perturb=enfold.Gaussian()), nn.Sequential)
