"""SubspaceSampling: each kind's equation, published settings, rejection, the ring of checkpoints, members that stay."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

import enfold
from clouds import three_clouds
from enfold.ensembles.common.pca import combine_points, principal_axes
from enfold.ensembles.subspace_sampling import SubspaceSampling
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import accuracy, per_member
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

KINDS = ("random", "dropout", "gaussian", "pca", "pca_random")
PLAN = TrainConfig(epochs=6, batch_size=32, lr=0.02)
DATA = three_clouds(96, 60, 30)
UNVALIDATED = DATA.replace(val=[])

pytestmark = pytest.mark.filterwarnings("ignore::enfold.train.diversity.LowDiversityWarning")


def network():
    torch.manual_seed(0)
    return MLP(4, [8], 3)


def trained(kind, network=None, data=DATA, plan=PLAN, **settings):
    settings = {"num_members": 4, "threshold": None, **settings}
    return fitted(SubspaceSampling(network or globals()["network"](), kind=kind, **settings), data, plan)


def flat(state, names):
    return torch.cat([state[name].detach().flatten(1) for name in names], dim=1).double()  # (M, P)


def members_of(model):
    return flat(model.sample(), model.moved)


def centre_of(model):
    return flat({name: tensor[None] for name, tensor in model.moved.items()}, model.moved)[0]


def checkpoints_of(model):
    return flat(model.path.state(), model.moved)


@pytest.mark.parametrize("kind", KINDS)
def test_at_scale_zero_there_is_only_the_centre_or_the_mean(kind):
    model = trained(kind, scale=0.0, checkpoints=4, fitted=6)
    middle = centre_of(model)
    if kind in ("gaussian", "pca"):
        middle = checkpoints_of(model).mean(0)
    if kind == "pca_random":
        middle = flat(model._points(), model.moved).mean(0)
    torch.testing.assert_close(members_of(model), middle.expand(4, -1), rtol=1e-5, atol=1e-6)


def test_random_samples_have_their_distance_in_independent_directions():
    model = trained("random", scale=3.0)
    offsets = members_of(model) - centre_of(model)
    torch.testing.assert_close(offsets.norm(dim=1), model.distance.double(), rtol=1e-5, atol=1e-6)
    assert (model.distance > 0).all()
    assert (model.distance < 3).all()
    assert len(model.distance.unique()) == 4
    directions = torch.nn.functional.normalize(offsets, dim=1)
    assert (directions @ directions.T - torch.eye(4)).abs().max() < 0.5, "independent in 67 dimensions"
    fixed = trained("random", scale=3.0, random_scale=False)
    assert fixed.distance.tolist() == [3.0] * 4


def test_samples_are_drawn_again_until_they_are_accurate_enough():
    model = trained("random", plan=PLAN.replace(epochs=20), num_members=8, scale=8.0, threshold=0.6)
    chosen, distances = model.attempt.tolist(), model.distance.tolist()
    scores = []  # of every try of every sample
    for attempt in range(5):
        for sample in range(8):
            model.attempt[sample] = attempt
            model.distance[sample] = model._scale((8.0, True), sample, attempt)
        assert all(model.distance[k] == distances[k] for k in range(8) if chosen[k] == attempt)
        scores.append(per_member(accuracy, predict(model, DATA.val)))
    for sample, tries in enumerate(torch.stack(scores, dim=1).tolist()):
        enough = [attempt for attempt, score in enumerate(tries) if score >= 0.6]
        assert chosen[sample] == (enough[0] if enough else tries.index(max(tries)))
    assert 0 in chosen
    assert max(chosen) > 0


def test_the_best_sample_is_used_if_none_is_accurate_enough():
    hopeless = trained("random", scale=8.0, threshold=1.01)
    assert (per_member(accuracy, predict(hopeless, DATA.val)) > 0.3).all()
    assert len(hopeless.attempt.unique()) > 1
    unseen = trained("random", data=UNVALIDATED, threshold=1.01)
    assert unseen.attempt.tolist() == [0] * 4


def test_dropout_masks_all_weights_and_biases_and_scales_the_rest():
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3))
    model = trained("dropout", wide, scale=0.4, random_scale=False)
    quotient = members_of(model) / centre_of(model)
    kept = quotient.abs() > 1e-9
    torch.testing.assert_close(quotient[kept], torch.full_like(quotient[kept], 1 / 0.6), rtol=1e-5, atol=0)
    assert abs(float((~kept).double().mean()) - 0.4) < 0.03
    biases = model.sample()["0.bias"]
    assert 0.25 < float((biases == 0).double().mean()) < 0.55
    fractions = [(row == 0).double().mean().item() for row in members_of(trained("dropout", wide))]
    assert all(fraction < 0.12 for fraction in fractions)
    assert len(set(fractions)) == 4, "each member has its own rate"


@pytest.mark.slow
def test_gaussian_samples_have_the_mean_and_deviation_of_the_checkpoints():
    settings = {"num_members": 400, "checkpoints": 4, "plan": PLAN.replace(epochs=4), "data": UNVALIDATED}
    model = trained("gaussian", **settings)
    points, drawn = checkpoints_of(model), members_of(model)
    z = (drawn - points.mean(0)) / torch.from_numpy(np.std(points.numpy(), axis=0))
    assert abs(float(z.mean())) < 0.02
    assert abs(float(z.std()) - 1) < 0.02
    wider = trained("gaussian", scale=3.0, **settings)
    torch.testing.assert_close(members_of(wider) - points.mean(0), 3 * (drawn - points.mean(0)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_principal_axes_are_those_of_scikit_learn(scaled):
    generator = torch.Generator().manual_seed(0)
    points = {"a": torch.randn(7, 3, 4, generator=generator), "b": torch.randn(7, 5, generator=generator)}
    rows = flat(points, points)
    axes = (rows - rows.mean(0)).T @ principal_axes(points, 4, scaled=scaled)  # (P, rank)
    reference = PCA(4).fit(rows.numpy())
    expected = torch.from_numpy(reference.components_.T)
    if scaled:
        expected = expected * torch.from_numpy(reference.explained_variance_ * 6 / 7).sqrt()
    signs = (axes * expected).sum(0).sign()
    torch.testing.assert_close(axes * signs, expected, rtol=1e-5, atol=1e-6)
    assert principal_axes(points, 99).shape == (7, 6), "K points have K - 1 axes"
    at_mean = combine_points(points, torch.zeros(2, 7))
    torch.testing.assert_close(at_mean["b"], points["b"].mean(0).expand(2, 5))


@pytest.mark.parametrize("kind", ["pca", "pca_random"])
def test_pca_samples_are_in_the_span_of_the_axes(kind):
    model = trained(kind, num_members=9, rank=2, checkpoints=5, fitted=6)
    points = flat(model._points(), model.moved)
    offsets = members_of(model) - points.mean(0)
    assert torch.linalg.matrix_rank(offsets, rtol=1e-4) == 2
    axes = torch.from_numpy(PCA(2).fit(points.numpy()).components_)
    torch.testing.assert_close(offsets @ axes.T @ axes, offsets, rtol=1e-3, atol=1e-4)


def test_pca_is_scaled_by_the_deviation_only_with_scaled():
    settings = {"num_members": 300, "rank": 2, "checkpoints": 6, "data": UNVALIDATED}
    for scaled, wanted in ((False, np.ones(2)), (True, None)):
        model = trained("pca", scaled=scaled, **settings)
        points = checkpoints_of(model)
        fitted = PCA(2).fit(points.numpy())
        spread = (members_of(model) - points.mean(0)).numpy() @ fitted.components_.T
        expected = np.sqrt(fitted.explained_variance_ * 5 / 6) if wanted is None else wanted
        np.testing.assert_allclose(spread.std(0), expected, rtol=0.12)


def test_the_ring_contains_the_last_checkpoints():
    seen = []
    model = SubspaceSampling(network(), 4, kind="gaussian", checkpoints=3)
    fit(
        model,
        DATA,
        config=PLAN.replace(select="last"),
        on_epoch=lambda _: seen.append(centre_of(model).clone()),
        quiet=True,
    )
    assert int(model.count) == 6
    kept = {tuple(row.tolist()) for row in checkpoints_of(model)}
    assert kept == {tuple(row.tolist()) for row in seen[-3:]}


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_to_the_same_members_and_what_is_saved_is_loaded(kind, tmp_path):
    build = partial(SubspaceSampling, num_members=3, kind=kind, checkpoints=3, fitted=4, scale=0.3, threshold=0.5)
    plan, file = build(any_network()).configure(PLAN), tmp_path / "checkpoint.safetensors"

    class Stop(Exception):
        pass

    def stop(epoch):
        if epoch.epoch == 3:
            raise Stop

    complete = fitted(build(network()), DATA, PLAN)
    with pytest.raises(Stop):
        fit(build(network()), DATA, config=plan, checkpoint=file, on_epoch=stop, quiet=True)
    resumed = fitted(build(network()), DATA, PLAN, checkpoint=file)
    torch.testing.assert_close(resumed.state_dict(), complete.state_dict(), rtol=0, atol=0)
    enfold.save(complete, tmp_path / "model.safetensors")
    loaded = enfold.load(tmp_path / "model.safetensors", network())
    torch.testing.assert_close(loaded.expand(), complete.expand(), rtol=0, atol=0)
    inputs = DATA.test.inputs
    torch.testing.assert_close(loaded(inputs), complete(inputs), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_members_are_the_first_of_more(kind):
    few, more = (trained(kind, num_members=M, fitted=4) for M in (3, 5))
    torch.testing.assert_close(members_of(more)[:3], members_of(few), rtol=1e-4, atol=1e-4)


def test_batch_norm_statistics_are_each_members_own():
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    model = trained("random", normed, scale=2.0, threshold=0.5)
    hidden = [member[0](DATA.train.inputs) for member in model]
    means = torch.stack([values.mean(0) for values in hidden])
    torch.testing.assert_close(model.own.state()["1.running_mean"], means, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(means[0], means[1])


def test_frozen_parameters_are_not_moved():
    frozen = network()
    frozen.requires_grad_(False)
    frozen.head.requires_grad_(True)
    names = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    for kind in KINDS:
        drawn = trained(kind, frozen, scale=0.5, fitted=4).sample()
        assert drawn.keys() == dict(frozen.named_parameters()).keys()
        assert all(torch.equal(drawn[name], frozen.get_parameter(name).expand_as(drawn[name])) for name in names)
        assert not torch.equal(drawn["head.weight"][0], drawn["head.weight"][1])


def test_the_published_settings():
    assert SubspaceSampling(any_network()).num_members == 30
    assert [SubspaceSampling(any_network(), kind=kind).amount for kind in KINDS] == [
        (10.0, True), (0.1, True), (1.0, False), (1.0, False), (1.0, False)
    ]  # fmt: skip
    plots = [SubspaceSampling.for_plot(network(), kind) for kind in KINDS[:4]]
    assert [plot.amount for plot in plots] == [(70.0, True), (0.1, True), (10.0, True), (6.0, False)]
    assert all(plot.num_members == 50 and plot.threshold is None for plot in plots)
    assert SubspaceSampling.for_plot(network(), "pca", num_members=5).num_members == 5
    assert SubspaceSampling(any_network(), kind="pca").configure(TrainConfig(patience=3)).select == "last"
    assert SubspaceSampling(any_network()).configure(TrainConfig(patience=3)) == TrainConfig(patience=3)


def test_what_is_stored():
    one = sum(tensor.numel() for tensor in network().parameters())
    sizes = {
        kind: sum(t.numel() for t in SubspaceSampling(network(), 4, kind=kind).state_dict().values()) for kind in KINDS
    }
    assert all(sizes[kind] < 1.1 * one + 200 for kind in ("random", "dropout", "pca_random"))
    assert all(11 * one <= sizes[kind] < 11.1 * one + 200 for kind in ("gaussian", "pca"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "swag"}, r"kind .*got 'swag'"),
        ({"scale": -1.0}, r"scale .*got -1\.0"),
        ({"kind": "dropout", "scale": 1.0}, r"scale .*got 1\.0"),
        ({"checkpoints": 1}, r"checkpoints .*got 1"),
        ({"rank": 0}, r"rank .*got 0"),
        ({"num_members": 0}, r"num_members .*got 0"),
    ],
)
def test_invalid_options_are_refused(settings, message):
    with pytest.raises(EnfoldError, match=message):
        SubspaceSampling(any_network(), **settings)


def test_there_is_no_plot_of_pca_random():
    with pytest.raises(EnfoldError, match=r"kind .*got 'pca_random'"):
        SubspaceSampling.for_plot(network(), "pca_random")
