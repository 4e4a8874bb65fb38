"""Tabular regression: five FT-Transformers with a mean and a variance, distilled to one with both uncertainties.

The ensemble predicts the mixture of its members. Its variance is the sum of an aleatoric part, the noise in the data,
and an epistemic part, the disagreement of the members; a single network with three outputs learns both parts from it.
"""

from pathlib import Path

import torch
from rtdl_revisiting_models import FTTransformer
from sklearn.datasets import make_friedman1

import enfold
from enfold.tasks import Regression

FEATURES = 5


class Tabular(torch.nn.Module):
    """An FT-Transformer for numerical features."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        sizes = {"n_blocks": 1, "d_block": 32, "attention_n_heads": 4, "ffn_d_hidden_multiplier": 1.5}
        dropout = {"attention_dropout": 0.1, "ffn_dropout": 0.1, "residual_dropout": 0.0}
        self.network = FTTransformer(
            n_cont_features=FEATURES, cat_cardinalities=[], d_out=outputs, ffn_d_hidden=None, **sizes, **dropout
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the outputs of each row."""
        return self.network(rows, None)


def make_split(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Friedman function of five features with noise, standardized."""
    rows, values = make_friedman1(number, n_features=FEATURES, noise=1.0, random_state=seed)
    return torch.tensor(2 * rows - 1, dtype=torch.float32), torch.tensor((values - 14.4) / 5, dtype=torch.float32)


def plot(values: torch.Tensor, inside: enfold.Prediction, outside: enfold.Prediction, file: str) -> None:
    """Draw values against predictions, and the disagreement of the members inside and outside of the training data."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    bars = 2 * inside.total[:60, 0].sqrt()
    left.errorbar(inside.mean[:60, 0], values[:60], xerr=bars, fmt="o", ms=3, lw=0.8, color="#0072B2")
    left.axline((0, 0), slope=1, color="black", lw=0.8)
    left.set(xlabel="prediction ± 2 standard deviations", ylabel="value")
    for name, found, colour in (("inside", inside, "#0072B2"), ("outside", outside, "#D55E00")):
        right.hist(found.epistemic.sqrt().flatten(), bins=30, density=True, alpha=0.6, label=name, color=colour)
    right.set(xlabel="disagreement of the members (standard deviation)", yticks=[])
    right.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Train, distil, compare, and show the uncertainty inside and outside of the training data."""
    train, val, test = make_split(300, 0), make_split(200, 1), make_split(1000, 2)

    # Two outputs for each number: the mean, and a value whose softplus is the variance.
    task = Regression(head="gaussian", variance="softplus")
    ensemble = enfold.DeepEnsemble(lambda: Tabular(2), 5)
    settings = {"epochs": 40, "batch_size": 20, "quiet": True}
    enfold.fit(ensemble, train, val, task=task, lr=3e-3, **settings)

    models = {"member 0": ensemble.member(0), "ensemble": ensemble}
    models["distilled"] = enfold.distill(ensemble, train, val, lr=1e-3, **settings)
    models["distilled, three outputs"] = enfold.distill(
        ensemble, train, val, student=lambda: Tabular(3), lr=3e-3, **settings
    )
    models["control"] = enfold.train_control(ensemble, train, val, lr=1e-3, **settings)
    for name, model in models.items():
        print(enfold.evaluate(model, test, val, reference=ensemble, name=name))

    inside, outside = ensemble.predict(test[0]), ensemble.predict(2 * test[0].sign() + test[0])
    for where, found in {"inside": inside, "outside": outside}.items():
        print(f"{where}: noise {found.aleatoric.mean():.3f}, disagreement of the members {found.epistemic.mean():.3f}")
    Path("runs").mkdir(exist_ok=True)
    plot(test[1], inside, outside, "runs/tabular_regression.png")


if __name__ == "__main__":
    main()
