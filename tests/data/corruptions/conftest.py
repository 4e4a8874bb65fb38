import pytest
import torch

from enfold.data import load


@pytest.fixture(scope="session")
def clothes():
    """Real grey images, (100, 1, 28, 28) bytes, read before a test hides the user's folders."""
    return load("fashion-mini").test.inputs[:100]


@pytest.fixture(scope="session")
def scenes():
    """Colour images with the spectrum of photographs (amplitude 1/f) and an object: (48, 3, 32, 32) in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(48, 3, 32, 32, generator=generator)
    white[:, 1:] = 0.8 * white[:, :1] + 0.6 * white[:, 1:]  # channels of photographs are much alike
    frequencies = torch.fft.fftfreq(32)
    radius = (frequencies[:, None] ** 2 + frequencies**2).sqrt().clamp(min=1 / 32)
    images = torch.fft.ifft2(torch.fft.fft2(white) / radius).real
    images = 0.45 + 0.18 * images / images.std((2, 3), keepdim=True)
    images[:, :, 10:22, 8:20] += 0.25
    return images.clamp(0, 1)
