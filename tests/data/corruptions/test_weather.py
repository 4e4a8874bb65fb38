import numpy as np
import pytest
import torch
from scipy import ndimage

from enfold.data.corruptions import corrupt
from enfold.data.corruptions.draws import Draws
from enfold.data.corruptions.spatter import distance_to, edges, equalise_histogram
from enfold.data.corruptions.weather import frost_texture, grey, paint, plasma_fractal


def test_clouds_span_zero_to_one_and_are_rougher_with_less_decay():
    smooth, rough = (plasma_fractal(Draws(0, "fog", torch.arange(20)), 32, decay) for decay in (3, 1.75))
    for clouds in (smooth, rough):
        torch.testing.assert_close(clouds.amin((1, 2)), torch.zeros(20))
        torch.testing.assert_close(clouds.amax((1, 2)), torch.ones(20))
    steps = [clouds.diff(dim=2).abs().mean() for clouds in (smooth, rough)]
    assert steps[1] > 1.2 * steps[0]
    wrapped = smooth.roll(1, 2) - smooth  # a torus has no seam
    assert wrapped[:, :, 0].abs().mean() < 2 * wrapped.abs().mean()


def test_clouds_by_hand():
    """On 2 x 2 with the corner at 0: the centre is noise n₀, the edges are n₀/2 + n₁ and n₀/2 + n₂."""
    noise = Draws(0, "fog", torch.arange(3)).draw_signed(3, 1, 1)[:, :, 0, 0]
    expected = torch.stack(
        [0 * noise[:, 0], noise[:, 0] / 2 + noise[:, 1], noise[:, 0] / 2 + noise[:, 2], noise[:, 0]], 1
    )
    low, high = expected.amin(1, keepdim=True), expected.amax(1, keepdim=True)
    clouds = plasma_fractal(Draws(0, "fog", torch.arange(3)), 2, 3.0)
    torch.testing.assert_close(clouds.flatten(1), (expected - low) / (high - low))


@pytest.mark.parametrize(("severity", "c"), [*enumerate((0.2, 0.5, 0.75, 1, 1.5), 1)])
def test_fog_keeps_the_brightest_possible_value(severity, c):
    black, white = torch.zeros(2, 3, 32, 32), torch.ones(2, 3, 32, 32)
    fogged = corrupt(white, "fog", severity)
    assert fogged.max().item() == pytest.approx(1)
    assert fogged.min().item() == pytest.approx(1 / (1 + c))
    assert corrupt(black, "fog", severity).max() == 0  # the brightest value of black is black
    assert torch.equal(fogged[:, 0], fogged[:, 2])


def test_snow_adds_light_symmetrically():
    black = torch.zeros(4, 3, 32, 32)
    for severity, kept in ((1, 0.95), (3, 0.9), (5, 0.8)):
        fallen = corrupt(black, "snow", severity)
        assert fallen.min().item() == pytest.approx((1 - kept) * 0.5, abs=0.15 if severity == 5 else 1e-6)
        assert fallen.std() > 0.01
        torch.testing.assert_close(fallen, fallen.rot90(2, (2, 3)))


def test_snow_falls():
    fallen = corrupt(torch.zeros(50, 1, 32, 32), "snow", 2)
    across, down = fallen.diff(dim=3).abs().mean(), fallen.diff(dim=2).abs().mean()
    assert across > 1.5 * down


def test_frost_texture_differs_between_images():
    texture = frost_texture(torch.zeros(50, 3, 32, 32), Draws(0, "frost", torch.arange(50)))
    assert texture.shape == (50, 1, 32, 32)
    assert 0 <= texture.min() < texture.max() <= 1
    assert 0.4 < texture.mean() < 0.6
    assert texture.std((1, 2, 3)).min() > 0.1
    assert not torch.equal(texture[0], texture[1])
    red, _, blue = corrupt(torch.zeros(1, 3, 32, 32), "frost", 5)[0].mean((1, 2))
    assert blue > red


def test_frost_is_the_published_mixture():
    images = torch.full((2, 1, 32, 32), 0.4)
    texture = paint(frost_texture(images, Draws(0, "frost", torch.arange(2))), (0.86, 0.94, 1.0), 1)
    torch.testing.assert_close(corrupt(images, "frost", 4), (0.85 * images + 0.4 * texture).clamp(0, 1))


def test_frost_does_not_change_with_the_resolution():
    small, large = (frost_texture(torch.zeros(4, 1, n, n), Draws(0, "frost", torch.arange(4))) for n in (32, 128))
    torch.testing.assert_close(large[..., ::4, ::4], small, atol=1e-4, rtol=0)


def test_grey_is_luma():
    torch.testing.assert_close(grey(torch.tensor([1.0, 0.5, 0]).view(1, 3, 1, 1)).item(), 0.299 + 0.2935)
    assert paint(torch.ones(1, 1, 1, 1), (1.0, 1.0, 1.0), 1).item() == pytest.approx(1)


def test_distance_is_scipys(scenes):
    places = scenes[:, :1] > 0.75
    places[0] = False
    for far in (3, 20):
        exact = np.stack([ndimage.distance_transform_edt(~image) for image in places[1:, 0].numpy()]).clip(max=far)
        torch.testing.assert_close(distance_to(places, far)[1:, 0].double(), torch.from_numpy(exact), atol=1e-5, rtol=0)
        assert (distance_to(places, far)[0] == far).all()


def test_edges_of_a_square_are_its_outline():
    levels = torch.zeros(1, 1, 16, 16)
    levels[..., 4:12, 4:12] = 200
    found = edges(levels)[0, 0]
    assert found.any(0).nonzero().flatten().tolist() == found.any(1).nonzero().flatten().tolist()
    assert not found[6:10, 6:10].any()
    assert not found[:3].any()
    assert 20 <= found.sum() <= 36
    assert not edges(torch.full((1, 1, 16, 16), 180.0)).any()


def test_weak_edges_count_next_to_strong_ones_only():
    levels = torch.zeros(1, 1, 8, 32)
    levels[..., 16:] = torch.linspace(0, 100, 8)[:, None]  # 4 x the step: 0 to 400, around both thresholds
    found = edges(levels)[0, 0].any(1)
    assert found[-3:].all()
    assert not found[0]
    lonely = torch.zeros(1, 1, 8, 32)
    lonely[..., 16:] = 30  # 120 everywhere: weak
    assert not edges(lonely).any()


def test_equalised_by_hand():
    levels = torch.tensor([[3.0, 3, 3, 3], [5, 5, 9, 9]]).view(2, 1, 2, 2)
    levels[0, 0, 0] = 1
    result = equalise_histogram(levels).flatten(1).tolist()
    assert result == [[0, 0, 255, 255], [0, 0, 255, 255]]
    three = equalise_histogram(torch.tensor([0.0, 0, 7, 20]).view(1, 1, 2, 2)).flatten().tolist()
    assert three == [0, 0, 128, 255]  # 1 of 2 above the lowest: 127.5, to the even


def test_water_brightens_and_mud_covers():
    images = torch.full((20, 3, 32, 32), 0.5)
    for severity in (1, 2, 3):
        wet = corrupt(images, "spatter", severity)
        assert (wet >= 0.5).all()
        assert wet.amax() > 0.9
        torch.testing.assert_close(wet[:, 1], wet[:, 2])
    for severity in (4, 5):
        muddy = corrupt(images, "spatter", severity)
        covered = muddy[:, 0] != 0.5
        assert 0.005 < covered.float().mean() < 0.3
        darkest = muddy.permute(0, 2, 3, 1).flatten(0, 2)[muddy.sum(1).flatten().argmin()]
        torch.testing.assert_close(darkest, torch.tensor([63.0, 42, 20]) / 255, atol=0.08, rtol=0)
