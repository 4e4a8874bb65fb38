"""Subsets and modes against direct computation, and refused arguments."""

from itertools import combinations

import numpy as np
import pytest
import torch

from enfold.errors import EnfoldError
from enfold.metrics import accuracy, gibbs_nll, mean_member, nll
from enfold.metrics.predictions import Predictions
from enfold.metrics.subsets import over_modes, over_subsets


def predictions(members, seed=0, examples=30):
    logits = torch.randn(members, examples, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Predictions.from_logits(logits, torch.arange(examples) % 4)


@pytest.mark.parametrize("metric", [nll, accuracy])
def test_all_members_are_the_ensemble_and_single_ones_its_mean_member(metric):
    p = predictions(5)
    assert over_subsets(metric, p, 5) == metric(p)
    assert over_subsets(metric, p, 1) == pytest.approx(mean_member(metric, p))


def test_it_is_the_mean_over_every_subset():
    p = predictions(5)
    probs = p.log_probs.exp().numpy()
    direct = [
        -np.log(probs[list(chosen)].mean(0)[np.arange(30), p.labels.numpy()]).mean()
        for chosen in combinations(range(5), 3)
    ]
    assert len(direct) == 10
    assert over_subsets(nll, p, 3) == pytest.approx(np.mean(direct))


def test_more_members_never_hurt_the_mean_nll():
    p = predictions(6)
    curve = [over_subsets(nll, p, size) for size in range(1, 7)]
    assert curve == sorted(curve, reverse=True)


def test_many_subsets_are_sampled_without_repetition():
    p, seen = predictions(12, examples=4), []

    def metric(part):
        seen.append(tuple(part.log_probs[:, 0, 0].tolist()))
        return gibbs_nll(part)

    first = over_subsets(metric, p, 6, limit=50, seed=1)
    assert len(seen) == len(set(seen)) == 50
    assert over_subsets(gibbs_nll, p, 6, limit=50, seed=1) == first
    assert over_subsets(gibbs_nll, p, 6, limit=50, seed=2) != first
    assert over_subsets(gibbs_nll, p, 6, limit=1000) == pytest.approx(gibbs_nll(p)), "each member is in as many"


def test_modes_are_averaged_first_and_weighted_equally():
    one, many = predictions(1, seed=1), predictions(9, seed=2)
    p = over_modes([one, many])
    assert p.num_members == 2
    probs = [part.log_probs.exp().numpy().mean(0) for part in (one, many)]
    np.testing.assert_allclose(p.mean().log_probs[0].exp().numpy(), (probs[0] + probs[1]) / 2)
    torch.testing.assert_close(over_modes([one]).log_probs, one.log_probs)


@pytest.mark.parametrize("size", [0, 6])
def test_a_size_that_does_not_fit_is_refused(size):
    with pytest.raises(EnfoldError, match=rf"size .*got {size}"):
        over_subsets(nll, predictions(5), size)


def test_invalid_inputs_are_refused():
    with pytest.raises(EnfoldError, match="limit"):
        over_subsets(nll, predictions(3), 2, limit=0)
    with pytest.raises(EnfoldError, match="modes"):
        over_modes([])
    with pytest.raises(EnfoldError, match="mode 1"):
        over_modes([predictions(2), predictions(2, examples=29)])
