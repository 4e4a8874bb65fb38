"""Hyper-deep ensembles: what candidates draw, that picks weigh the mean, storing, resuming, and a small search."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import enfold
import enfold.ensembles.common.search
from clouds import three_clouds
from enfold.ensembles.common.search import FewerCandidatesWarning, Pool, Setting
from enfold.ensembles.deep_ensemble import DeepEnsemble
from enfold.ensembles.hyper_deep_ensemble import HyperDeepEnsemble
from enfold.errors import EnfoldError
from enfold.evaluate import predict
from enfold.metrics import nll, per_member
from enfold.metrics.greedy import greedy_selection
from enfold.networks import MLP
from enfold.train import TrainConfig, fit
from fitting import any_network, fitted

CONTRACT = {"options": {"candidates": 4}}

pytestmark = pytest.mark.filterwarnings("ignore::enfold.ensembles.common.search.FewerCandidatesWarning")

PLAN = TrainConfig(epochs=6, batch_size=16, lr=0.05, weight_decay=0.01, select="last")
DATA = three_clouds(120, 90, 60)
SMALL = partial(HyperDeepEnsemble, num_members=3, candidates=5, chunk=5)


def network():
    torch.manual_seed(0)
    return MLP(4, [8], 3)


def picked(counts, build=None):
    """Different networks, each counted so often, and these networks."""
    build = build or partial(HyperDeepEnsemble, num_members=len(counts) + 1, candidates=4)
    pool = DeepEnsemble(network(), len(counts), seed=7).networks()
    members = build(network()).eval()
    members.set_networks(pool, counts, [Setting(0.1 * (k + 1), 0.2, 0.3) for k in range(len(counts))])
    return members, pool


def test_the_first_candidate_is_the_plan_and_the_others_draw_within_their_ranges():
    build = partial(HyperDeepEnsemble, candidates=400, lr=(0.5, 2.0))
    first, *drawn = build(network()).candidate_settings(PLAN)
    assert first == Setting(0.05, 0.01, 0.0)
    assert all(0.025 <= each.lr <= 0.1 for each in drawn)
    assert all(1e-5 <= each.weight_decay <= 0.1 for each in drawn)
    assert all(1e-5 <= each.label_smoothing <= 0.2 for each in drawn)
    decades = torch.tensor([math.log10(each.weight_decay / 0.01) for each in drawn])  # uniform on -3 to 1
    assert abs(float(decades.mean()) + 1) < 0.2
    assert abs(float(decades.std()) - 4 / math.sqrt(12)) < 0.1


def test_draws_depend_on_the_candidate_only():
    few, more = (
        HyperDeepEnsemble(any_network(), candidates=5).candidate_settings(PLAN),
        HyperDeepEnsemble(any_network(), candidates=9).candidate_settings(PLAN),
    )
    assert more[:5] == few
    assert HyperDeepEnsemble(any_network(), candidates=5, seed=1).candidate_settings(PLAN)[1] != few[1]
    kept = HyperDeepEnsemble(any_network(), candidates=5, weight_decay=None, label_smoothing=None).candidate_settings(
        PLAN
    )
    assert set(kept) == {Setting(0.05, 0.01, 0.0)}


@pytest.mark.parametrize("engine", ["loop", "stacked", "vmap"])
def test_picks_weigh_the_mean(engine):
    members, pool = picked([1, 1, 2])
    members.set_engine(engine)
    inputs = torch.randn(6, 4)
    probs = torch.stack([one.eval()(inputs).softmax(-1) for one in pool])
    assert members.num_members == 4
    assert members(inputs).shape == (4, 6, 3)
    expected = probs[0] / 4 + probs[1] / 4 + probs[2] / 2
    torch.testing.assert_close(members.forward_mean(inputs).exp(), expected)
    torch.testing.assert_close(members(inputs), torch.stack([one.eval()(inputs) for one in members]))
    torch.testing.assert_close(members.forward_each(inputs.expand(4, 6, 4)), members(inputs))


def test_a_selected_network_runs_once():
    members, _ = picked([1, 3])  # of at most three
    members.set_engine("loop")(torch.randn(2, 4))  # its first call tries the engine
    calls = []
    members.skeleton.network.register_forward_hook(lambda *ignored: calls.append(1))
    members(torch.randn(2, 4))
    assert len(calls) == 2
    assert members.num_members == 4


def test_each_stored_network_runs_once_in_train_mode():
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    build = partial(HyperDeepEnsemble, num_members=2, candidates=4)
    members = build(network)
    members.set_networks(DeepEnsemble(network, 2, seed=3).networks(), [1, 2], [Setting(0.1, 0.1, 0.1)] * 2)
    before = members.tree.state()["1.running_mean"].clone()
    members.train()
    assert members(torch.randn(8, 4)).shape == members.forward_each(torch.randn(2, 8, 4)).shape == (2, 8, 3)
    assert not torch.equal(before, members.tree.state()["1.running_mean"])


def test_saved_and_loaded_counts_as_before(tmp_path):
    members, _ = picked([1, 3])
    enfold.save(members, tmp_path / "members.safetensors")
    loaded = enfold.load(tmp_path / "members.safetensors", network())
    inputs = torch.randn(5, 4)
    assert loaded.num_members == 4
    assert loaded.options() == members.options()
    torch.testing.assert_close(loaded(inputs), members(inputs), rtol=0, atol=0)
    torch.testing.assert_close(loaded.settings[:2], torch.tensor([[0.1, 0.2, 0.3], [0.2, 0.2, 0.3]]))


def searched(chunk):
    pool = Pool(network(), DATA, PLAN, chunk, 0, "auto", None, "search", True)
    return pool, pool.train("search", SMALL(network()).candidate_settings(PLAN), keep=True)


@pytest.mark.slow
def test_candidates_do_not_depend_on_the_chunk_size():
    complete, separate = searched(5), searched(2)
    assert [each.num_members for each in separate[1]] == [2, 2, 1]
    together = torch.cat([each.log_probs for each in separate[1]])
    torch.testing.assert_close(together, complete[1][0].log_probs, rtol=1e-3, atol=1e-4)
    assert len(separate[0].networks) == 5


def test_without_stratification_members_are_the_selected_candidates():
    build = partial(HyperDeepEnsemble, num_members=2, candidates=5, chunk=5, stratify=False)
    members = fitted(build(network()), DATA, PLAN)
    pool, predictions = searched(5)
    found = greedy_selection(predictions, 2)
    expected = [pool.networks[index] for index in found.picks]
    inputs = torch.randn(6, 4)
    mean = torch.stack([one.eval()(inputs).softmax(-1) for one in expected]).mean(0)
    torch.testing.assert_close(members.forward_mean(inputs).exp(), mean, rtol=1e-4, atol=1e-5)
    assert not members.training


@pytest.mark.slow
def test_stratification_trains_selected_settings_again():
    members = fitted(SMALL(network()), DATA, PLAN)
    validation = predict(members, DATA.val)
    assert int((members.counts > 0).sum()) > 1
    assert members.num_members == int(members.counts.sum()) == validation.num_members
    assert nll(validation) < float(per_member(nll, validation).min())
    possible = torch.tensor(SMALL(network()).candidate_settings(PLAN))
    used = members.settings[members.counts > 0]
    assert all(bool(torch.isclose(row, possible).all(1).any()) for row in used)
    assert nll(predict(members, DATA.test)) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["search, 4", "stratify, 1"])
def test_a_kill_between_chunks_continues_to_the_same_members(tmp_path, monkeypatch, killed_in):
    build, plan = partial(HyperDeepEnsemble, num_members=2, candidates=5, chunk=3), PLAN.replace(epochs=2)
    once = fitted(build(network()), DATA, plan)
    checkpoint, real = tmp_path / "members.ckpt", enfold.ensembles.common.search.fit

    def dying(*args, **kwargs):
        if killed_in in kwargs["title"]:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(enfold.ensembles.common.search, "fit", dying)
    with pytest.raises(KeyboardInterrupt):
        fitted(build(network()), DATA, plan, checkpoint=checkpoint)
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "members-search-0.ckpt" in files
    monkeypatch.setattr(enfold.ensembles.common.search, "fit", real)
    again = fitted(build(network()), DATA, plan, checkpoint=checkpoint)
    seen = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert files.items() <= seen.items()  # what was finished was not trained again
    torch.testing.assert_close(dict(again.state_dict()), dict(once.state_dict()), rtol=0, atol=0)


def test_a_checkpoint_of_another_search_is_refused(tmp_path):
    checkpoint = tmp_path / "members.ckpt"
    fitted(SMALL(network()), DATA, PLAN.replace(epochs=1), checkpoint=checkpoint)
    other = partial(HyperDeepEnsemble, num_members=3, candidates=5, chunk=5, seed=1)
    with pytest.raises(EnfoldError, match="checkpoint must belong to the same training"):
        fitted(other(network()), DATA, PLAN.replace(epochs=1), checkpoint=checkpoint)


def test_selected_members_can_be_trained_further():
    members, _ = picked([2, 1])
    networks = DeepEnsemble(members.networks())
    before = networks.expand()["head.weight"].detach().clone()
    history = fit(networks, DATA, config=PLAN.replace(epochs=2, select="best"), quiet=True)
    assert len(history.epochs[-1].train_loss) == 3  # a network that counts as two members is two networks
    moved = (networks.expand()["head.weight"] != before).flatten(1).any(1)
    assert moved.all()


def test_invalid_inputs():
    with pytest.raises(EnfoldError, match=r"num_members .*got 0"):
        HyperDeepEnsemble(any_network(), num_members=0)
    with pytest.raises(EnfoldError, match=r"candidates .*got 3"):
        HyperDeepEnsemble(any_network(), num_members=4, candidates=3, stratify=False)
    with pytest.raises(EnfoldError, match=r"chunk .*got 0"):
        HyperDeepEnsemble(any_network(), chunk=0)
    with pytest.raises(EnfoldError, match=r"goal .*got 'acc'"):
        HyperDeepEnsemble(any_network(), goal="acc")
    with pytest.raises(EnfoldError, match=r"weight_decay .*got \(0\.0"):
        HyperDeepEnsemble(any_network(), weight_decay=(0.0, 1.0))
    with pytest.raises(EnfoldError, match=r"label_smoothing .*got \(0\.1"):
        HyperDeepEnsemble(any_network(), label_smoothing=(0.1, 1.5))
    with pytest.raises(EnfoldError, match=r"weight_decay .*got \(0\.1"):
        fitted(SMALL(network()), DATA, PLAN.replace(weight_decay=(0.1, 0.2)))
    with pytest.raises(EnfoldError, match=r"val .*got None"):
        fitted(SMALL(network()), DATA.replace(val=[]), PLAN)


def test_fewer_different_networks_than_num_members_give_a_warning(tmp_path):
    with pytest.warns(FewerCandidatesWarning, match="selected [123] different networks? instead of 4"):
        members = fitted(HyperDeepEnsemble(network(), 4, candidates=4, stratify=False, goal="accuracy"), DATA, PLAN)
    enfold.save(members, tmp_path / "members.safetensors")
    assert enfold.load(tmp_path / "members.safetensors", network()).notice == members.notice
    assert not picked([1, 2, 1], partial(HyperDeepEnsemble, num_members=3))[0].notice
    assert "1 different network instead of 3" in picked([2], partial(HyperDeepEnsemble, num_members=3))[0].notice
