"""compress end to end on a dense task, and on members that were fine-tuned from one network."""

import copy

import pytest
import torch
from torch import nn

import enfold
from enfold.compress.scores import Scores
from enfold.data.convert import as_data

pytestmark = pytest.mark.filterwarnings("ignore")


def discs(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy images of a disc (N, 1, 16, 16), and the class of each pixel, 255 at the border."""
    source = torch.Generator().manual_seed(seed)
    centres = torch.rand(number, 2, 1, 1, generator=source) * 8 + 4
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    labels = ((grid - centres).square().sum(1) < 14).long()
    images = labels[:, None] + 0.8 * torch.randn(number, 1, 16, 16, generator=source)
    labels[:, :1] = 255
    return images, labels


@pytest.mark.slow
def test_segmentation_with_a_unet():
    nets = pytest.importorskip("monai.networks.nets")

    def make() -> nn.Module:
        return nets.UNet(2, 1, 2, channels=(4, 8), strides=(2,), norm="batch")

    train, val = discs(0, 48), discs(1, 24)
    task = enfold.tasks.Classification(ignore_index=255)
    settings = {"lr": 1e-2, "batch_size": 12, "task": task, "quiet": True}
    members = enfold.DeepEnsemble(make, 3, seed=0)
    enfold.fit(members, train, epochs=6, **settings)
    found = enfold.compress(members, train, val, epochs=4, **settings)
    tried = {trial.name: trial for trial in found.trials}
    assert {"distill", "distill + labels", "distill + cutmix", "control"} <= tried.keys()
    assert [trial.note for trial in found.trials if trial.note.startswith("failed")] == []
    assert found.chosen.scores["nll"] <= found.diagnosis.best_member_loss
    assert found.network(val[0]).shape == (24, 2, 16, 16)
    assert type(found.network).__module__.startswith("monai.")


@pytest.mark.slow
def test_members_that_were_fine_tuned_from_one_network():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(1200, 8, generator=source)
    labels = (inputs[:, :4].prod(1) + inputs[:, 4] > 0).long()
    base = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 2))
    enfold.fit(base, (inputs[:700], labels[:700]), epochs=15, lr=1e-2, quiet=True)
    train, val = (inputs[700:900], labels[700:900]), (inputs[900:], labels[900:])
    networks = [copy.deepcopy(base) for _ in range(3)]
    for seed, network in enumerate(networks):
        enfold.fit(network, train, epochs=4, lr=2e-3, seed=seed, batch_size=16, select="last", quiet=True)
    found = enfold.compress(networks, train, val, base=base, epochs=2, lr=1e-3, batch_size=32, quiet=True)
    assert found.diagnosis.is_one_basin
    merges = {trial.name: trial for trial in found.trials if trial.kind == "merge"}
    assert {
        "wise-ft",
        "model stock",
        "task arithmetic",
        "ties",
        "dare",
        "average",
        "fisher",
        "regmean",
    } <= merges.keys()
    assert [trial.name for trial in merges.values() if not trial.scores] == []
    assert merges["average"].scores["nll"] <= found.diagnosis.mean_member
    assert found.chosen.scores["nll"] <= min(trial.scores["nll"] for trial in merges.values())


def test_packed_sequences_and_labels_that_are_unknown():
    """Costs are ratios for a batch whose number of examples its tensors do not show."""
    rnn = nn.utils.rnn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(12, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, packed):
            rows = rnn.PackedSequence(self.embed(packed.data), *packed[1:])
            return self.head(rnn.pad_packed_sequence(self.lstm(rows)[0], batch_first=True)[0][:, 0])

    source = torch.Generator().manual_seed(0)
    words = [torch.randint(12, (length,), generator=source) for length in (5, 3, 4, 2, 5, 1)]
    labels = (torch.rand(6, 3, generator=source) < 0.5).float()
    labels[0, 1] = -100
    batches = [(rnn.pack_sequence(words, enforce_sorted=False), labels)]
    ensemble = enfold.DeepEnsemble(Tagger, 3, seed=0)
    enfold.fit(ensemble, batches, task="multilabel", epochs=2, quiet=True)
    found = enfold.compress(ensemble, batches, batches, epochs=1, quiet=True)
    assert {"average", "regmean", "control", "distill"} <= {trial.name for trial in found.trials}
    failed = [trial.name for trial in found.trials if trial.note.startswith("failed")]
    assert failed == ["fisher"]  # needs gradients of single examples
    scores = Scores(as_data(batches, batches), ensemble.task, "nll", {}, {}, ensemble.member(0))
    assert scores.cost(ensemble) == 3.0
