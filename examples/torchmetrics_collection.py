"""torchmetrics: metrics of an ensemble and of its mean prediction in one collection, updated batch by batch."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassF1Score

import enfold
from enfold.integrations.torchmetrics import EnsembleMetric, MeanPredictionMetric, make_collection


def main() -> None:
    """Train, distil and measure batch by batch."""
    data = enfold.data.load("fashion-mini", train_size=1000)
    make_net = enfold.networks.factory("mlp", data.shape, data.num_classes)
    ensemble = enfold.DeepEnsemble(make_net, 3)
    enfold.fit(ensemble, data, epochs=5, quiet=True)
    student = enfold.distill(ensemble, data, init="random", epochs=5, quiet=True)
    test = DataLoader(TensorDataset(data.prepare(data.test.inputs), data.test.targets), batch_size=200)

    of_ensemble = MetricCollection(
        {
            "accuracy": EnsembleMetric("accuracy"),
            "nll": EnsembleMetric("nll"),
            "ece": EnsembleMetric("ece"),
            "disagreement": EnsembleMetric(enfold.metrics.disagreement),
            "f1": MeanPredictionMetric(MulticlassF1Score(data.num_classes)),
        }
    )
    of_network = make_collection("accuracy", "nll", "ece", members=False)
    with torch.no_grad():
        for inputs, targets in test:
            of_ensemble.update(ensemble(inputs), targets)
            of_network.update(student(inputs), targets)
    for name, metrics in (("ensemble", of_ensemble), ("distilled", of_network)):
        print(f"{name}: " + "  ".join(f"{key} {float(value):.3f}" for key, value in metrics.compute().items()))


if __name__ == "__main__":
    main()
