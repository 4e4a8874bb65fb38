"""Several labels for each example: four networks with one logit per label, distilled to one.

Targets are 0 and 1 in the shape of the outputs; a label that is unknown is -100.
"""

import torch
from torch import nn

import enfold

LABELS = ("is even", "is prime", "is less than 5", "has a loop")
ANSWERS = torch.tensor([[n % 2 == 0, n in (2, 3, 5, 7), n < 5, n in (0, 6, 8, 9)] for n in range(10)])


def make_net() -> nn.Module:
    """Return a network with one logit per label."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, len(LABELS)))


def main() -> None:
    """Train, distil and compare: which properties does the digit in a noisy image have?"""
    digits = enfold.data.load("digits")
    rng = torch.Generator().manual_seed(0)

    def split(part: enfold.Split, unknown: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        images = part.inputs + 0.4 * torch.randn(part.inputs.shape, generator=rng)
        targets = ANSWERS[part.labels].float()
        return images, targets.masked_fill(torch.rand(targets.shape, generator=rng) < unknown, -100)

    train, val, test = split(digits.train, unknown=0.2), split(digits.val), split(digits.test)
    ensemble = enfold.DeepEnsemble(make_net, 4)
    enfold.fit(ensemble, train, val, task="multilabel", epochs=40, lr=3e-3, batch_size=64, quiet=True)
    net = enfold.distill(ensemble, train, val, epochs=30, lr=1e-3, batch_size=64, quiet=True)
    control = enfold.train_control(ensemble, train, val, epochs=30, lr=1e-3, batch_size=64, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    prediction = ensemble.predict(test[0][:1])
    for label, probability in zip(LABELS, prediction.mean[0].tolist(), strict=True):
        print(f"  {label}: {probability:.2f}")


if __name__ == "__main__":
    main()
