"""A band contains the accuracy of calibrated predictions, narrows with more examples, and is 0 for empty bins."""

import pytest
import torch

from enfold.errors import EnfoldError
from enfold.metrics import ece, reliability, reliability_band
from enfold.metrics.predictions import Predictions


def calibrated(N, seed=0):
    draw = torch.Generator().manual_seed(seed)
    confidence = 0.5 + 0.5 * torch.rand(N, generator=draw, dtype=torch.float64)
    right = torch.rand(N, generator=draw) < confidence
    probs = torch.stack([confidence, 1 - confidence], -1)
    return Predictions(probs.log()[None], 1 - right.long())


@pytest.mark.slow
def test_calibrated_predictions_are_inside_the_band():
    p = calibrated(4000)
    band = reliability_band(p, bins=10, replicates=400)
    filled = band.diagram.counts > 0
    assert (band.lower <= band.diagram.accuracy).all()
    assert (band.diagram.accuracy <= band.upper).all()
    inside = (band.lower <= band.diagram.confidence) & (band.diagram.confidence <= band.upper)
    assert inside[filled].sum() >= filled.sum() - 1
    assert (band.upper[~filled] == 0).all()
    assert filled.sum() == 5
    torch.testing.assert_close(band.diagram.accuracy, reliability(p, 10).accuracy)


def test_it_is_the_standard_error_of_a_fraction():
    p = calibrated(4000)
    band = reliability_band(p, bins=10, scheme="mass", replicates=2000)
    accuracy, counts = band.diagram.accuracy, band.diagram.counts
    expected = 2 * 1.96 * (accuracy * (1 - accuracy) / counts).sqrt()
    torch.testing.assert_close(band.upper - band.lower, expected, rtol=0.15, atol=0)
    wide = reliability_band(calibrated(400), bins=10, scheme="mass", replicates=500)
    assert (wide.upper - wide.lower)[:9].min() > (band.upper - band.lower)[:9].max()
    assert ece(p) < 0.05


def test_an_invalid_level_is_refused():
    with pytest.raises(EnfoldError, match=r"level .*95"):
        reliability_band(calibrated(200), level=95)
