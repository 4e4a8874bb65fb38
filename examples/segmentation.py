"""Segmentation: four U-Nets of MONAI on images of digits, distilled to one U-Net.

Dense classification needs nothing special: outputs are (B, C, H, W), targets (B, H, W), and pixels with the target -100
are neither trained nor scored.
"""

import numpy as np
import torch
from monai.networks.nets import UNet
from scipy.ndimage import gaussian_filter, zoom

import enfold

SIZE, DIGITS = 24, 4  # pixels; the digits 0 to 3 are the classes 1 to 4, the texture is the class 0


def make_scenes(number: int, split: str = "train", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Place two handwritten digits on a random texture.

    The digits are those of the split "train" or "test" of the digits that ship with enfold, at 10 to 16 pixels and with
    random contrast. The texture is smoothed noise plus a wave. Digits may overlap: the second one is in front. Pixels
    between ink and paper, where the class is arbitrary, have the target -100.
    """
    rng = np.random.default_rng([seed, split == "test"])
    source = getattr(enfold.data.load("digits"), split)
    kept = source.labels < DIGITS
    images, labels = source.inputs[kept].numpy().reshape(-1, 8, 8), source.labels[kept].numpy()
    images = images / images.max()
    scenes, targets = np.zeros((number, 1, SIZE, SIZE), np.float32), np.zeros((number, SIZE, SIZE), np.int64)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    for scene, target in zip(scenes[:, 0], targets, strict=True):
        angle, phase = rng.uniform(0, 2 * np.pi, 2)
        wave = np.sin((np.cos(angle) * rows + np.sin(angle) * columns) * rng.uniform(0.4, 1.2) + phase)
        noise = gaussian_filter(rng.normal(size=(SIZE, SIZE)), rng.uniform(0.5, 1.5))
        scene += 0.2 * wave + 0.3 * noise / noise.std()
        for index in rng.integers(len(images), size=2):
            side = rng.integers(10, 17)
            ink = zoom(images[index], side / 8, order=1)
            top, left = rng.integers(0, SIZE - side + 1, 2)
            place = np.s_[top : top + side, left : left + side]
            scene[place] += rng.uniform(1.0, 2.0) * ink
            target[place] = np.where(ink > 0.5, labels[index] + 1, np.where(ink > 0.3, -100, target[place]))
    return torch.from_numpy(scenes), torch.from_numpy(targets)


def make_net() -> torch.nn.Module:
    """Return a small U-Net with residual units and batch norm."""
    size = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1, "norm": "batch"}
    return UNet(spatial_dims=2, in_channels=1, out_channels=DIGITS + 1, **size)


def plot(image: torch.Tensor, prediction: enfold.Prediction, file: str) -> None:
    """Draw an image, the predicted classes, and where the members disagree."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained")
    axes[0].imshow(image, cmap="gray")
    axes[1].imshow(prediction.classes[0], cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
    shown = axes[2].imshow(prediction.epistemic[0], cmap="magma")
    for part, title in zip(axes, ("image", "classes", "disagreement (nats)"), strict=True):
        part.set(title=title, xticks=[], yticks=[])
    figure.colorbar(shown)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, distil and compare."""
    train, val, test = make_scenes(120), make_scenes(60, seed=1), make_scenes(120, "test")
    settings = {"batch_size": 24, "lr": 1e-2, "quiet": True}

    ensemble = enfold.DeepEnsemble(make_net, 4)
    enfold.fit(ensemble, train, val, epochs=24, **settings)
    net = enfold.distill(ensemble, train, val, epochs=12, **settings)
    control = enfold.train_control(ensemble, train, val, epochs=12, **settings)

    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    prediction = ensemble.predict(test[0][:8])
    print("probabilities", tuple(prediction.mean.shape), "uncertainty of each pixel", tuple(prediction.epistemic.shape))
    enfold.save(net, "runs/unet.safetensors")
    plot(test[0][0, 0], ensemble.predict(test[0][:1]), "runs/segmentation.png")


if __name__ == "__main__":
    main()
