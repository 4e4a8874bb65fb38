import pytest
import torch

from enfold.data.corruptions import corrupt


def grey(value, count=64):
    return torch.full((count, 3, 32, 32), value)


@pytest.mark.parametrize(("severity", "std"), [*enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1)])
def test_gaussian_noise_has_its_moments(severity, std):
    noise = corrupt(grey(0.5), "gaussian_noise", severity) - 0.5
    assert noise.mean().item() == pytest.approx(0, abs=5 * std / noise.numel() ** 0.5)
    assert noise.std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize(("severity", "std"), [*enumerate((0.06, 0.1, 0.12, 0.16, 0.2), 1)])
def test_speckle_is_in_proportion_to_the_value(severity, std):
    for value in (0.2, 0.5):
        noise = corrupt(grey(value), "speckle_noise", severity) - value
        assert noise.std().item() == pytest.approx(std * value, rel=0.01)
    assert torch.equal(corrupt(grey(0.0, 1), "speckle_noise", severity), grey(0.0, 1))


@pytest.mark.parametrize(("severity", "photons"), [*enumerate((500, 250, 100, 75, 50), 1)])
def test_shot_noise_counts_photons(severity, photons):
    for value in (0.0, 0.04, 0.5):
        result = corrupt(grey(value), "shot_noise", severity)
        torch.testing.assert_close(result * photons, (result * photons).round(), atol=1e-4, rtol=0)
        assert result.mean().item() == pytest.approx(value, abs=0.001)
        assert result.var().item() == pytest.approx(value / photons, rel=0.03)


@pytest.mark.parametrize(("severity", "share"), [*enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1)])
def test_impulses_are_black_or_white_in_equal_parts(severity, share):
    result = corrupt(grey(0.5), "impulse_noise", severity)
    assert set(result.unique().tolist()) == {0.0, 0.5, 1.0}
    for end in (0.0, 1.0):
        assert (result == end).float().mean().item() == pytest.approx(share / 2, rel=0.06)


def test_milder_noise_is_the_same_noise():
    mild, strong = (corrupt(grey(0.5, 4), "gaussian_noise", severity) - 0.5 for severity in (1, 3))
    torch.testing.assert_close(2 * mild, strong, atol=1e-6, rtol=0)
