import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from enfold.data import Data, Split
from enfold.data.corruptions import KINDS, SEVERITIES, STANDARD, Corrupted, corrupt, corrupt_split, corruptions, suite
from enfold.errors import EnfoldError

RANDOM = {*KINDS} - {
    *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur"),
    "saturate",
}
GROWING = {*KINDS} - {"glass_blur", "frost", "elastic_transform", "spatter", "saturate"}  # these change their nature


def distortion(images, kind, severity):
    return (corrupt(images, kind, severity) - images).square().mean().sqrt().item()


def test_names():
    assert len(KINDS) == len(set(KINDS)) == 19
    assert len(STANDARD) == 15
    assert {*KINDS} - {*STANDARD} == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}


@pytest.mark.combinations
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 3, 32, 32), (1, 3, 64, 48), (3, 1, 8, 13)])
def test_shape_type_and_range(kind, shape):
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    for severity in SEVERITIES:
        result = corrupt(images, kind, severity)
        assert result.shape == shape
        assert result.dtype == torch.float32
        assert 0 <= result.min() <= result.max() <= 1
        assert torch.isfinite(result).all()
    assert torch.equal(images, before)
    coarse = corrupt((images * 255).byte(), kind, 3)
    assert (coarse.dtype, coarse.shape) == (torch.uint8, shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floating_types_are_preserved(scenes, dtype):
    result = corrupt(scenes[:2].to(dtype), "gaussian_blur", 3)
    assert result.dtype == dtype
    torch.testing.assert_close(result.float(), corrupt(scenes[:2], "gaussian_blur", 3), atol=0.01, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_rounded_numbers(scenes, kind):
    coarse = (scenes * 255).round().byte()
    difference = corrupt(coarse, kind, 4) / 255 - corrupt(coarse / 255, kind, 4)
    assert difference.abs().max() < 0.51 / 255


@pytest.mark.parametrize("kind", KINDS)
def test_single_images_and_batches_agree(scenes, kind, monkeypatch):
    images = (scenes * 255).round().byte()
    together = corrupt(images, kind, 5, seed=7)
    torch.testing.assert_close(corrupt(images[41:42], kind, 5, seed=7, indices=[41]), together[41:42], atol=0, rtol=0)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(corrupt(images[order], kind, 5, seed=7, indices=order), together[order], atol=0, rtol=0)
    monkeypatch.setattr(suite, "CHUNK", 11 * 3072)
    torch.testing.assert_close(corrupt(images, kind, 5, seed=7), together, atol=0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_and_indices_matter_where_something_is_random(scenes, kind):
    images = scenes[:1].expand(2, -1, -1, -1)
    both = corrupt(images, kind, 3, seed=0)
    other = corrupt(images, kind, 3, seed=1)
    assert torch.equal(both, corrupt(images, kind, 3, seed=0))
    assert torch.equal(both[0], both[1]) == (kind not in RANDOM)
    assert torch.equal(both, other) == (kind not in RANDOM)


@pytest.mark.parametrize("kind", sorted(GROWING))
def test_distortion_grows_with_severity(scenes, clothes, kind):
    for images in (scenes, clothes[:40] / 255):
        distortions = [distortion(images, kind, severity) for severity in SEVERITIES]
        slack = 0.02 if kind in ("motion_blur", "jpeg_compression") else 0  # motion 3 and 4 differ in the far tail only
        for milder, stronger in itertools.pairwise(distortions):
            assert stronger > milder * (1 - slack)
        assert distortions[-1] > 1.3 * distortions[0] > 0


@pytest.mark.parametrize("kind", sorted({*KINDS} - GROWING))
def test_the_others_distort_too(scenes, kind):
    for severity in SEVERITIES:
        assert 0.01 < distortion(scenes, kind, severity) < 0.4


def test_larger_images_have_similar_corruptions(scenes):
    """Enlarged and corrupted is about corrupted and enlarged, since lengths grow with the image."""
    for kind in ("gaussian_blur", "defocus_blur", "zoom_blur"):
        larger = torch.nn.functional.interpolate(scenes, scale_factor=2, mode="bilinear")
        expected = torch.nn.functional.interpolate(corrupt(scenes, kind, 5), scale_factor=2, mode="bilinear")
        error = (corrupt(larger, kind, 5) - expected).square().mean().sqrt()
        assert error < 0.35 * distortion(scenes, kind, 5)


def test_all_kinds_and_severities_one_after_the_other(scenes, monkeypatch):
    calls = []
    original = suite.corrupt
    monkeypatch.setattr(suite, "corrupt", lambda *a, **k: calls.append(a[1:]) or original(*a, **k))
    steps = corruptions(scenes[:4], ("fog", "contrast"), (1, 5), seed=3)
    assert calls == []
    kind, severity, images = next(steps)
    assert (kind, severity, calls) == ("fog", 1, [("fog", 1)])
    torch.testing.assert_close(images, original(scenes[:4], "fog", 1, seed=3), atol=0, rtol=0)
    assert [step[:2] for step in steps] == [("fog", 5), ("contrast", 1), ("contrast", 5)]


def test_subsets_of_the_data(clothes):
    labels = torch.arange(100) % 10
    data = Data(Split(clothes, labels), Split(clothes[:10], labels[:10]), Split(clothes, labels), 10, (1, 28, 28))
    split = corrupt_split(data, "frost", 3, seed=5)
    assert isinstance(split, Split)
    assert (split.source, split.kind, split.severity) == ("corrupted", "frost", 3)
    assert split.name == "corrupted frost 3 (generated texture)"
    assert "100 inputs of shape (1, 28, 28)" in repr(split)
    assert split.inputs.dtype == torch.uint8
    torch.testing.assert_close(split.inputs, corrupt(clothes, "frost", 3, seed=5), atol=0, rtol=0)
    assert split.labels is labels
    part = split[2:4]
    assert isinstance(part, Corrupted)
    assert (len(part), part.name) == (2, split.name)
    assert len(corrupt_split(data, "fog", 1, part="val")) == 10
    assert corrupt_split(data, "fog", 1).name == "corrupted fog 1"


def test_no_images():
    assert corrupt(torch.zeros(0, 3, 32, 32), "jpeg_compression", 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"severity": 6}, "severity .*got 6"),
        ({"severity": 0}, "got 0"),
        ({"severity": 3.0}, r"severity .*got 3\.0"),
        ({"kind": "gaussian_nose"}, "kind .*did you mean 'gaussian_noise'"),
        ({"kind": "xyz"}, "kind .*'xyz'"),
        ({"images": torch.full((1, 3, 32, 32), 1.5)}, r"values in \[0, 1\] without NaN, got 1\.5 to 1\.5"),
        ({"images": torch.full((1, 3, 32, 32), -0.1)}, r"got -0\.1 to -0\.1"),
        ({"images": torch.full((1, 3, 32, 32), torch.nan)}, "without NaN, got nan"),
        ({"images": torch.rand(1, 4, 32, 32)}, r"\(B, 1 or 3, H, W\).*got \(1, 4, 32, 32\)"),
        ({"images": torch.rand(3, 32, 32)}, r"got \(3, 32, 32\)"),
        ({"images": torch.rand(1, 3, 32, 7)}, r"images .*\(1, 3, 32, 7\)"),
        ({"images": torch.ones(1, 3, 32, 32, dtype=torch.int64)}, r"uint8 or floating point, got torch\.int64"),
        ({"indices": [1, 2]}, r"indices .*\(2,\)"),
        ({"indices": [0.5]}, r"got shape \(1,\) of torch.float32"),
    ],
)
def test_mistakes(change, message):
    call = {"images": torch.rand(1, 3, 32, 32), "kind": "fog", "severity": 1, **change}
    with pytest.raises(EnfoldError, match=message):
        corrupt(**call)
    if "indices" not in change:
        with pytest.raises(EnfoldError, match=message):
            corruptions(call["images"], [call["kind"]], [call["severity"]])


def test_mistakes_with_data(clothes):
    split = Split(clothes, torch.zeros(100, dtype=torch.int64))
    data = Data(split, split, [(clothes, split.labels)], 10, (1, 28, 28))
    with pytest.raises(EnfoldError, match=r"part .*'tset'"):
        corrupt_split(data, "fog", 1, part="tset")
    with pytest.raises(EnfoldError, match=r"test split .*list"):
        corrupt_split(data, "fog", 1)


@given(st.integers(8, 40), st.integers(8, 40), st.sampled_from(KINDS), st.sampled_from(SEVERITIES))
def test_any_size(height, width, kind, severity):
    image = torch.linspace(0, 1, height * width).view(1, 1, height, width)
    result = corrupt(image, kind, severity)
    assert result.shape == image.shape
    assert 0 <= result.min() <= result.max() <= 1
