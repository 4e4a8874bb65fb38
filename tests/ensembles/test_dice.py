"""DICE: the loss is the published one, the critic estimates the mutual information, and members share less."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import enfold
from clouds import three_clouds
from enfold.data.batches import Batch
from enfold.ensembles.dice import DICE, Critic, other_of_class
from enfold.errors import EnfoldError
from enfold.networks import MLP
from enfold.train import TrainConfig, fit

PLAN = TrainConfig(epochs=4, batch_size=20, lr=0.02, optimizer="sgd", weight_decay=0.0)
DATA = three_clouds(60, 30, 60)


def network() -> nn.Module:
    torch.manual_seed(0)
    return MLP(4, [5], 3)


def correlated(rho: float, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two members whose outputs have this correlation given the class, and the classes."""
    source = torch.Generator().manual_seed(seed)
    classes = torch.randint(2, (size,), generator=source)
    first, noise = torch.randn(2, size, 2, generator=source)
    second = rho * first + math.sqrt(1 - rho**2) * noise
    return torch.stack([first, second]) + 3.0 * classes[:, None], classes


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "low", "high"), [(0.0, -0.05, 0.05), (0.9, 1.0, 1.7)])
def test_the_critic_estimates_the_conditional_mutual_information(rho, low, high):
    critic = Critic(2, 2, 32, seed=0)  # the true value is -ln(1 - rho²), 1.66 for 0.9
    for step in range(600):
        critic.learn(*correlated(rho, 256, step), 3e-3)
    found = float(critic.redundancy(*correlated(rho, 20_000, 10_000))[0])
    assert low < found < high


def test_partners_are_other_examples_of_the_class():
    classes = torch.tensor([2, 0, 1, 0, 2, 0])
    kept, partner = other_of_class(classes)
    assert kept.tolist() == [0, 1, 3, 4, 5]  # class 1 has one example
    assert sorted(partner.tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(classes[kept][partner], classes[kept])
    assert not bool((partner == torch.arange(5)).any())


def test_the_loss_is_the_sum_of_its_terms():
    members = DICE(network(), 3, redundancy=0.5, bottleneck=0.2, noise=1e-6)
    members.on_fit_start(DATA, PLAN)
    critic = members.critic
    for part in critic.parts():
        part += 0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1))
    batch = Batch(DATA.train.inputs[:30], DATA.train.labels[:30])
    found = members.train().objective(PLAN)(members, batch)
    outputs = members(batch.inputs)
    kept, partner = other_of_class(batch.targets)
    w1, b1, w2, b2, w3, b3, centres = critic.parts()
    shared = torch.zeros(3)
    for number, (i, j) in enumerate(critic.pairs):
        logits = []
        for other in (kept, kept[partner]):
            label, which = F.one_hot(batch.targets[kept], 3).float(), torch.eye(3)[number].expand(len(kept), -1)
            hidden = torch.cat([outputs[i][kept], outputs[j][other], label, which], 1)
            for weight, bias in ((w1, b1), (w2, b2)):
                hidden = F.leaky_relu(hidden @ weight.T + bias)
            logits.append((hidden @ w3.T + b3)[:, 0])
        bound = logits[0].mean() - logits[1].exp().mean().log()
        shared[i] += bound
        shared[j] += bound
    for member in range(3):
        loss = F.cross_entropy(outputs[member], batch.targets)
        distance = (outputs[member] - centres[member][batch.targets]).square().sum(1).mean()
        expected = loss + 0.2 / (2 * 1e-12) * distance + 0.5 / 4 * shared[member]
        torch.testing.assert_close(found[member], expected, rtol=1e-4, atol=1e-4)


def within_class_correlation(members: DICE) -> float:
    with torch.no_grad():
        outputs = members.eval()(DATA.train.inputs)
    centred = torch.cat(
        [each - each.mean(1, keepdim=True) for each in (outputs[:, DATA.train.labels == c] for c in range(3))], 1
    )
    first, second = centred.flatten(1)
    return float(torch.corrcoef(torch.stack([first, second]))[0, 1].abs())


@pytest.mark.slow
def test_members_share_less_with_more_weight():
    found = []
    for redundancy in (0.0, 3.0):
        members = DICE(network(), 2, redundancy=redundancy, noise=0.3, critic_rate=1e-2)
        fit(members, DATA, config=PLAN.replace(epochs=60), quiet=True)
        found.append(within_class_correlation(members))
    assert found[1] < 0.5 * found[0]


def test_without_its_terms_it_is_a_deep_ensemble():
    members = DICE(network(), 2, redundancy=0.0, bottleneck=0.0, noise=0.0)
    deep = enfold.DeepEnsemble(members.networks())
    fit(members, DATA, config=PLAN, quiet=True)
    fit(deep, DATA, config=PLAN.replace(order="shared", select="last"), quiet=True)
    for name, tensor in members.expand().items():
        torch.testing.assert_close(tensor, deep.expand()[name], rtol=1e-4, atol=1e-5)


def test_a_resumed_training_has_the_same_bits(tmp_path):
    class Stopped(Exception):
        pass

    def stop(epoch):
        if len(seen) == 2:
            raise Stopped
        seen.append(epoch)

    whole, parts, seen = DICE(network(), 3), DICE(network(), 3), []
    fit(whole, DATA, config=PLAN, quiet=True)
    with pytest.raises(Stopped):
        fit(parts, DATA, config=PLAN, quiet=True, checkpoint=tmp_path / "state", on_epoch=stop)
    parts = DICE(network(), 3)
    fit(parts, DATA, config=PLAN, quiet=True, checkpoint=tmp_path / "state")
    assert all(torch.equal(tensor, parts.expand()[name]) for name, tensor in whole.expand().items())


def test_the_critic_is_neither_saved_nor_counted(tmp_path):
    members = DICE(network(), 2)
    count = sum(each.numel() for each in members.parameters())
    fit(members, DATA, config=PLAN, quiet=True)
    assert sum(each.numel() for each in members.parameters()) == count
    enfold.save(members, tmp_path / "dice.safetensors")
    loaded = enfold.load(tmp_path / "dice.safetensors", network())
    inputs = DATA.test.inputs
    torch.testing.assert_close(loaded(inputs), members(inputs))


def test_a_loader_without_known_classes():
    dataset = torch.utils.data.TensorDataset(DATA.train.inputs, DATA.train.labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=20)
    fit(DICE(network(), 2), loader, epochs=1, quiet=True)
    with pytest.raises(EnfoldError, match="length"):
        fit(DICE(network(), 2), (batch for batch in loader), epochs=1, quiet=True)


@pytest.mark.parametrize("settings", [{"bootstrap": True}, {"folds": 2}, {"order": "split"}, {"patience": 1}], ids=str)
def test_settings_of_separate_members_are_refused(settings):
    with pytest.raises(EnfoldError, match=next(iter(settings))):
        fit(DICE(network(), 2), DATA, config=PLAN.replace(**settings), quiet=True)


def test_other_tasks_and_a_bottleneck_without_noise_are_refused():
    with pytest.raises(EnfoldError, match="examples of one class"):
        fit(DICE(MLP(4, [5], 1), 2), (DATA.train.inputs, torch.randn(60)), task="regression", epochs=1, quiet=True)
    with pytest.raises(EnfoldError, match="noise must be positive"):
        DICE(network(), 2, noise=0.0)
