"""Several inputs: four networks that take an image and a row of a table and return one logit, distilled to one.

A single logit and targets 0 and 1 are `task="binary"`. Inputs in memory are a tuple or a dictionary of tensors.
"""

import torch
from torch import nn

import enfold


class ImageAndTable(nn.Module):
    """A convolutional network for the image, joined with the row."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten())
        self.both = nn.Sequential(nn.Linear(32 + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, image: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Return one logit for each example, (B, 1)."""
        return self.both(torch.cat([self.image(image), row], dim=1))


def main() -> None:
    """Train, distil and compare: is the digit in the image larger than a number in the table?"""
    digits = enfold.data.load("digits")
    rng = torch.Generator().manual_seed(0)

    def split(part: enfold.Split) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows = torch.randn(len(part), 4, generator=rng)
        is_larger = part.labels > 4.5 + 3 * rows[:, 0]
        return {"image": part.inputs, "row": rows}, is_larger.float()

    train, val, test = split(digits.train), split(digits.val), split(digits.test)
    ensemble = enfold.DeepEnsemble(ImageAndTable, 4)
    enfold.fit(ensemble, train, val, task="binary", epochs=15, lr=5e-3, batch_size=64, quiet=True)
    net = enfold.distill(ensemble, train, val, epochs=10, lr=1e-3, batch_size=64, quiet=True)
    control = enfold.train_control(ensemble, train, val, epochs=10, lr=1e-3, batch_size=64, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    inputs, _ = test
    print("probabilities of both classes", ensemble.predict(**inputs).mean[:2].tolist())


if __name__ == "__main__":
    main()
