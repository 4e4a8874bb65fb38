"""LatentBE: its step against an explicit one, its three averages, and its result."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data, Split
from enfold.distill import distill
from enfold.distill.cached import CachedTeacher
from enfold.distill.losses.latent_be import LatentBE, SameTargetsWarning, average_state
from enfold.engines.skeleton import read_state
from enfold.ensembles.batch_ensemble import BatchEnsemble
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hydra_ensemble import HydraEnsemble
from enfold.ensembles.mixed_ensemble import MixedEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll, per_member
from enfold.train import TrainConfig
from students import best

plain = pytest.mark.parametrize("members", ["plain"], indirect=True)
normed = pytest.mark.parametrize("members", ["normed"], indirect=True)
PLAN = TrainConfig(epochs=2, batch_size=16, lr=0.02)
AVERAGES = ("mean_outer", "outer_mean", "sum")


def small() -> nn.Sequential:
    """A grouped convolution with a bias, a batch norm and a head."""
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def published_steps(
    network: nn.Sequential, teachers: Tensor, inputs: Tensor, labels: Tensor, plan: TrainConfig, alpha: float
):
    """Three steps as the authors take them: the mean over members and examples, with gradients of r and s times M."""
    M, tau = len(teachers), 4.0
    conv, norm, _, _, head = network
    slow = [conv.weight, conv.bias, norm.weight, norm.bias, head.weight, head.bias]
    W, b, g, h, V, c = slow = [tensor.detach().clone().requires_grad_() for tensor in slow]
    fast = [torch.ones(M, size, dtype=torch.float64, requires_grad=True) for size in (2, 4, 16, 3)]
    r1, s1, r2, s2 = fast
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    optimizer = torch.optim.SGD([*slow, *fast], plan.lr, plan.momentum, nesterov=True)

    def rows(vectors: Tensor, axes: int) -> Tensor:
        return vectors.repeat_interleave(len(inputs), 0).view(M * len(inputs), -1, *(1,) * (axes - 2))

    for _ in range(3):
        x = rows(r1, 4) * inputs.repeat(M, 1, 1, 1)
        x = rows(s1, 4) * F.conv2d(x, W, b, groups=2)
        x = torch.tanh(F.batch_norm(x, mean, variance, g, h, training=True))
        z = (rows(s2, 2) * F.linear(rows(r2, 2) * x.flatten(1), V, c)).view(M, len(inputs), 3)
        soft = -((teachers / tau).softmax(-1) * (z / tau).log_softmax(-1)).sum(-1).mean()
        hard = F.cross_entropy(z.flatten(0, 1), labels.repeat(M))
        decay = 0.5 * sum(p.square().sum() for p in slow) + 0.5 / M * sum((1 - p).square().sum() for p in fast)
        loss = (1 - alpha) * hard + alpha * tau**2 * soft + plan.weight_decay * decay
        optimizer.zero_grad()
        loss.backward()
        for vector in fast:
            vector.grad *= M
        optimizer.step()
    return [tensor.detach() for tensor in (*slow, mean, variance, *fast)]


def test_three_steps_are_the_published_ones():
    torch.manual_seed(0)
    inputs, labels = torch.randn(12, 2, 4, 4, dtype=torch.float64), torch.arange(12) % 3
    data = Data(Split(inputs, labels), [], Split(inputs, labels), 3, (2, 4, 4))
    teachers, network = DeepEnsemble([small() for _ in range(4)]).eval(), small()
    plan = TrainConfig(
        epochs=3, batch_size=12, optimizer="sgd", lr=0.1, weight_decay=0.05, schedule="constant"
    )  # fmt: skip
    expected = published_steps(network, teachers(inputs).detach(), inputs, labels, plan, alpha=0.8)
    latent = distill(teachers, data, student=lambda: network, loss=LatentBE(alpha=0.8, average="none"), config=plan)
    state, fast = latent.shared.state(), latent.fast.state()
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias", "1.running_mean", "1.running_var")
    found = [*(state[name] for name in names), *(fast[name][0] for name in ("0.r", "0.s", "4.r", "4.s"))]
    torch.testing.assert_close([tensor.detach() for tensor in found], expected, rtol=1e-9, atol=1e-11)
    assert all((vectors - 1).abs().max() > 1e-3 for vectors in expected[-4:])


def spread(members, scale: float = 0.3, seed: int = 0):
    """The members, with r, s and what each owns moved at random."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for vectors in [*members.fast.parameters(), *members.own.parameters()]:
            vectors.add_(scale * torch.randn(vectors.shape, generator=source, dtype=torch.float64).to(vectors))
    return members


class Attention(nn.Module):
    """An embedding, torch's own attention, a layer norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(self.norm(x + self.attention(x, x, x)[0]).mean(1))


@pytest.mark.parametrize(
    "network",
    [
        nn.Linear(5, 3),
        nn.Conv2d(4, 6, 3),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.Embedding(7, 4),
        Attention(),
        small(),
    ],
    ids=lambda network: type(network).__name__,
)
@pytest.mark.parametrize("bias", ["shared_pre", "shared_post", "member"])
@pytest.mark.filterwarnings("ignore::enfold.errors.PartialCoverageWarning")
def test_the_mean_of_outer_products_is_the_mean_of_the_members(network, bias):
    members = spread(BatchEnsemble(network, 3, bias=bias, init="ones", batch_norm="joint"))
    states = [read_state(member) for member in members.networks()]
    found = average_state(members)
    assert found.keys() == read_state(network).keys()
    for name, tensor in found.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.stack([state[name] for state in states]).mean(0))


@pytest.mark.parametrize("network", [nn.Linear(5, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Embedding(7, 4), small()])
def test_the_three_averages_by_their_equations(network):
    members = spread(BatchEnsemble(network, 3, bias="shared_pre", init="ones"))
    outer, added = average_state(members, "outer_mean"), average_state(members, "sum")
    fast = members.fast.state()
    for prefix, shape in members.layers.items():
        weight, name = members.shared.state()[f"{prefix}weight"], f"{prefix}weight"
        torch.testing.assert_close(added[name], 3 * average_state(members)[name])
        s, r = fast[f"{prefix}s"][0], fast.get(f"{prefix}r", torch.ones(1, 3, shape.outputs))[0]
        mean = weight * shape.factor(r.mean(0).view(1, 1, -1) if shape.inputs else None, s.mean(0).view(1, 1, -1))[0]
        torch.testing.assert_close(outer[name], mean)
        if f"{prefix}bias" in outer:
            for state in (outer, added):
                torch.testing.assert_close(
                    state[f"{prefix}bias"], s.mean(0) * members.shared.state()[f"{prefix}bias"]
                )  # fmt: skip


def test_a_covariance_by_hand():
    """r = (1, 3), s = (1, 3): the mean of products is 5, the product of means 4, the sum 10."""
    members = BatchEnsemble(nn.Linear(1, 1), 2, init="ones", bias="shared_pre")
    with torch.no_grad():
        members.shared.state()["weight"].fill_(1.0)
        members.shared.state()["bias"].fill_(7.0)
        for name in ("r", "s"):
            members.fast.get_parameter(name).copy_(torch.tensor([[[1.0], [3.0]]]))
    assert [average_state(members, how)["weight"].item() for how in AVERAGES] == [5.0, 4.0, 10.0]
    assert [average_state(members, how)["bias"].item() for how in AVERAGES] == [14.0, 14.0, 14.0]


def test_equal_members_have_equal_averages():
    """All three, after the sum is divided by M; at r = s = 1 it is the network and every member."""
    network = small()
    for members in (BatchEnsemble(network, 4, init="ones"), BatchEnsemble(network, 4, init="gaussian")):
        with torch.no_grad():
            for vectors in members.fast.parameters():
                vectors.copy_(vectors[:, :1].expand_as(vectors))
        mean, outer, added = (average_state(members, how) for how in AVERAGES)
        for name in ("0.weight", "4.weight"):
            torch.testing.assert_close([outer[name], added[name] / 4], [mean[name]] * 2)
            torch.testing.assert_close(mean[name], members.expand()[name][2])
    at_start = BatchEnsemble(network.eval(), 4, init="ones", bias="shared_pre", batch_norm="joint")
    inputs = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    found = at_start.network(average_state(at_start))
    torch.testing.assert_close(found(inputs), network(inputs))
    torch.testing.assert_close(at_start(inputs), network(inputs).expand(4, 5, 3))


@pytest.mark.parametrize("how", ["mean_outer", "outer_mean"])
def test_the_error_of_the_average_has_second_order(how):
    """Half the spread, a quarter of the difference to the members' mean prediction."""
    torch.manual_seed(0)
    network, inputs = small().eval(), torch.randn(20, 2, 4, 4, dtype=torch.float64)
    errors = []
    for scale in (0.02, 0.01, 0.005):
        members = spread(BatchEnsemble(network, 4, init="ones", bias="shared_pre", batch_norm="joint"), scale).eval()
        one = members.network(average_state(members, how))(inputs).softmax(-1)
        errors.append((one - members(inputs).softmax(-1).mean(0)).norm().item())
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("settings", [{}, {"batch_norm": "own"}, {"batch_norm": "shared", "bias": "member"}])
def test_one_network_of_the_users_class_from_the_latent_members(members, data, settings):
    network, latent = (
        distill(members, data, loss=LatentBE(average=average, **settings), config=PLAN)
        for average in ("mean_outer", "none")
    )
    assert type(network) is type(members.member(0))
    assert network.state_dict().keys() == members.member(0).state_dict().keys()
    assert type(latent) is BatchEnsemble
    assert latent.num_members == 4
    expected = latent.mean_state()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter, expected[name])
    assert not network.training


@pytest.mark.slow
@normed
def test_statistics_are_those_of_training_or_measured_again(members, data):
    """Measured if members have their own, or on request."""
    for choice in ("joint", "shared", "own"):
        latent = distill(members, data, loss=LatentBE(average="none", batch_norm=choice), config=PLAN)
        for wanted in (None, False, True):
            network = distill(
                members, data, loss=LatentBE(batch_norm=choice, reestimate_batch_norm=wanted), config=PLAN
            )
            kept = torch.allclose(network.norm.running_mean, latent.mean_state()["norm.running_mean"])
            assert kept == (wanted is False or (wanted is None and choice == "joint")), (choice, wanted)


@plain
def test_without_training_the_start_is_returned(members, data):
    equal = DeepEnsemble([members.member(1)] * 4)
    network = distill(equal, data, loss=LatentBE(), init=equal.member(0), config=PLAN.replace(epochs=0))
    for name, parameter in members.member(1).named_parameters():
        torch.testing.assert_close(dict(network.named_parameters())[name], parameter)
    fresh = distill(equal, data, loss=LatentBE(), config=PLAN.replace(epochs=0))
    assert not torch.allclose(fresh.head.weight, members.member(1).head.weight)


@plain
def test_the_epoch_is_selected_by_the_averaged_network(members, data):
    """With the sum, whose validation NLL falls here while the members' rises, so that they would stay at the start."""
    plan = PLAN.replace(optimizer="sgd", lr=0.5, schedule="constant", select="last", batch_size=40)
    method, start = LatentBE(average="sum"), best(members, data)

    def run(**settings) -> nn.Module:
        """Return the latent members; `finish` of the sum would return their average."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LatentBE, "finish", lambda self, student, data: student)
            return distill(members, data, loss=method, init=start, config=plan, **settings)

    latent = [run(epochs=epochs) for epochs in range(4)]
    scores = [float(per_member(nll, predict(model, data.val)).mean()) for model in latent]
    assert scores.index(min(scores)) == 0
    chosen = run(epochs=3, select="best")
    after = [nll(predict(method.evaluated_model(model), data.val)) for model in (*latent, chosen)]
    assert after[3] == min(after)
    assert after[4] == pytest.approx(after[3])


@pytest.mark.slow
@plain
def test_latent_members_diverge_and_the_network_learns(members, data):
    plan = PLAN.replace(epochs=40, batch_size=40, lr=0.05, select="last")
    latent, network = (
        distill(members, data, loss=LatentBE(average=average), config=plan) for average in ("none", "mean_outer")
    )
    assert all((vectors.std(1) > 0).any() for vectors in latent.fast.parameters())
    ensemble = predict(members, data.train).mean().log_probs[0]
    start = distill(members, data, loss=LatentBE(), config=plan.replace(epochs=0))
    apart = [
        F.kl_div(predict(one, data.train).log_probs[0], ensemble, reduction="batchmean", log_target=True)
        for one in (network, start)
    ]
    assert apart[0] < 0.2 * apart[1]


@plain
def test_equal_teachers_give_a_warning(members, data):
    first, second = members.member(0), members.member(1)
    with pytest.warns(SameTargetsWarning, match="teachers 0 and 1"):
        latent = distill(DeepEnsemble([first] * 3), data, loss=LatentBE(average="none"), config=PLAN)
    for vectors in latent.fast.parameters():
        torch.testing.assert_close(vectors, vectors[:, :1].expand_as(vectors))
    with pytest.warns(SameTargetsWarning, match="teachers 1 and 2 are"):
        distill(DeepEnsemble([first, second, second]), data, loss=LatentBE(), config=PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distill(DeepEnsemble([first]), data, loss=LatentBE(), config=PLAN)  # there is nobody to be told apart from


def test_loaders_cached_teachers_and_other_architectures(members, data, networks):
    loader = data.replace(train=[(data.train.inputs, data.train.labels)])
    assert torch.isfinite(distill(members, loader, loss=LatentBE(), config=PLAN)(data.test.inputs)).all()
    with torch.no_grad():
        recorded = CachedTeacher(members.eval()(data.train.inputs))
    kind = type(members.member(0))
    assert type(distill(recorded, data, loss=LatentBE(), config=PLAN, student=kind)) is kind
    mixed = MixedEnsemble([networks["plain"](), networks["normed"]()])
    assert type(distill(mixed, data, loss=LatentBE(), config=PLAN, student=networks["plain"])) is networks["plain"]


def test_vectors_have_the_steps_of_a_single_member():
    for optimizer, scale in (("sgd", 5), ("adamw", 1)):
        student = LatentBE().build_student(nn.Linear(4, 3), 5, PLAN.replace(optimizer=optimizer))
        assert student.fast_grad_scale == scale
        assert student.fast_decay == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"average": "median"}, "average .* got 'median'"),
        ({"bias": "none"}, "bias .* got 'none'"),
        ({"batch_norm": "mine"}, "batch_norm .* got 'mine'"),
        ({"fast_decay": -1.0}, "fast_decay .* got -1.0"),
        ({"temperature": 0.0}, "temperature .* got 0.0"),
    ],
)
def test_invalid_options(settings, message):
    with pytest.raises(EnfoldError, match=message):
        LatentBE(**settings)


@pytest.mark.parametrize("kind", [BatchEnsemble, HydraEnsemble])
def test_the_latent_members_start_equal(members, data, kind):
    with pytest.raises(EnfoldError, match=f"LatentBE.* got a {kind.__name__}"):
        distill(members, data, student=kind(members.member(0), 4), loss=LatentBE(), config=PLAN)


def test_labels_only_give_a_warning(members, data):
    with pytest.warns(SameTargetsWarning, match="alpha=0"):
        distill(members, data, loss=LatentBE(alpha=0.0), config=PLAN, epochs=0)
