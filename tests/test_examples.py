"""The examples run as they are, and their networks train as in plain PyTorch."""

import copy
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from enfold import DeepEnsemble, fit
from enfold.tasks import Regression
from website import gallery

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = {
    "dict_batches": "transformers",
    "export_onnx": "onnxruntime",
    "graphs": "torch_geometric",
    "huggingface_trainer": "datasets",
    "lightning_module": "lightning",
    "lora_adapters": "peft",
    "segmentation": "monai",
    "sklearn_estimators": "pandas",
    "tabular_regression": "rtdl_revisiting_models",
    "tokens": "transformers",
    "torchmetrics_collection": "torchmetrics",
    "trackers": "tensorboard",
}
NAMES = sorted(file.stem for file in EXAMPLES.glob("*.py") if file.stem != "quality")


def load_example(name: str):
    """Return an example as a module; skip the test if its package is not installed."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # `make examples`
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name, tmp_path):
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"needs {PACKAGES[name]}")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ensemble: " in done.stdout
    assert "distilled: " in done.stdout
    assert "Error" not in done.stderr
    stored = (EXAMPLES / "output" / f"{name}.txt").read_text()
    assert words(done.stdout) == words(stored), "the page of this example is not up to date: run `make gallery`"


def words(text: str) -> list[str]:
    """Return the words of printed lines, without numbers."""
    return re.findall(r"[A-Za-z_]{3,}", text)


def test_every_example_has_a_stored_output_and_figures_for_its_page():
    for file in gallery.examples():
        assert (EXAMPLES / "output" / f"{file.stem}.txt").is_file(), "run `make gallery`"
        assert gallery.figures(file) or "enfold.evaluate(" not in file.read_text()
    for notebook in gallery.notebooks():
        cells = json.loads(notebook.read_text())["cells"]
        stored = json.loads((EXAMPLES / "output" / f"{notebook.stem}.json").read_text())
        assert len(stored) == len(cells)
        assert gallery.figures(notebook)


def plain_training(network: nn.Module, batches: list, loss, epochs: int, lr: float) -> nn.Module:
    """Train a network as `fit` does by default: AdamW with a cosine schedule."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    network.train()
    for step in range(epochs * len(batches)):
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * step / (epochs * len(batches)))) / 2
        optimizer.zero_grad()
        loss(network, copy.copy(batches[step % len(batches)])).backward()
        optimizer.step()
    return network


def require_plain_training(make, batches: list, loss, **settings) -> None:
    """Compare the members after `fit` with networks trained one by one, relative to the largest change of a weight."""
    ensemble = DeepEnsemble(make, 3)
    start = ensemble.networks()
    expected = [plain_training(copy.deepcopy(network), batches, loss, 2, 3e-3) for network in start]
    fit(ensemble, batches, epochs=2, lr=3e-3, select="last", quiet=True, **settings)
    for first, found, wanted in zip(start, ensemble.networks(), expected, strict=True):
        first, found, wanted = (
            torch.cat([tensor.detach().flatten() for tensor in network.parameters()])
            for network in (first, found, wanted)
        )
        assert float((found - wanted).abs().max()) < 1e-6 * float((wanted - first).abs().max())


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
def test_a_token_classifier_trains_as_in_plain_pytorch():
    example = load_example("tokens")
    sentences = example.make_sentences(96)
    batches = [example.collate(sentences[start : start + 32]) for start in (0, 32, 64)]

    def make():
        network = example.make_net()
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return network

    require_plain_training(make, batches, lambda network, batch: network(**batch).loss)


@pytest.mark.slow
@pytest.mark.usefixtures("in_double")
def test_a_unet_trains_as_in_plain_pytorch():
    example = load_example("segmentation")
    images, targets = example.make_scenes(48)
    batches = [(images[start : start + 16].double(), targets[start : start + 16]) for start in (0, 16, 32)]
    require_plain_training(
        example.make_net, batches, lambda network, batch: F.cross_entropy(network(batch[0]), batch[1])
    )


@pytest.mark.usefixtures("in_double")
def test_a_graph_network_trains_as_in_plain_pytorch():
    example = load_example("graphs")
    from torch_geometric.loader import DataLoader

    batches = list(DataLoader(example.make_graphs(96), batch_size=32))
    for batch in batches:
        batch.x = batch.x.double()
    require_plain_training(example.GraphNet, batches, lambda network, batch: F.cross_entropy(network(batch), batch.y))


@pytest.mark.usefixtures("in_double")
def test_a_tabular_network_with_a_variance_trains_as_in_plain_pytorch():
    example = load_example("tabular_regression")
    rows, values = example.make_split(96, 0)
    batches = [(rows[start : start + 32].double(), values[start : start + 32].double()) for start in (0, 32, 64)]

    def make():
        network = example.Tabular(2)
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return network

    def loss(network, batch):
        mean, raw = network(batch[0]).unbind(1)
        return F.gaussian_nll_loss(mean, batch[1], F.softplus(raw), full=True)

    require_plain_training(make, batches, loss, task=Regression(head="gaussian", variance="softplus"))


@pytest.mark.usefixtures("in_double")
def test_a_tagger_with_packed_sequences_trains_as_in_plain_pytorch():
    example = load_example("sequences")
    rng = torch.Generator().manual_seed(0)
    sentences = [example.make_sentence(rng) for _ in range(96)]
    batches = [example.collate(sentences[start : start + 32]) for start in (0, 32, 64)]

    def loss(network, batch):
        words, lengths, tags = batch
        return F.cross_entropy(network(words, lengths).flatten(0, 1), tags.flatten())

    require_plain_training(example.Tagger, batches, loss)


@pytest.mark.usefixtures("in_double")
def test_a_network_with_two_inputs_and_one_logit_trains_as_in_plain_pytorch():
    example = load_example("several_inputs")
    rng = torch.Generator().manual_seed(0)
    batches = [
        {
            "image": torch.randn(16, 1, 8, 8, generator=rng),
            "row": torch.randn(16, 4, generator=rng),
            "label": (torch.rand(16, generator=rng) < 0.5).double(),
        }
        for _ in range(3)
    ]

    def loss(network, batch):
        return F.binary_cross_entropy_with_logits(network(batch["image"], batch["row"])[:, 0], batch["label"])

    require_plain_training(example.ImageAndTable, batches, loss, task="binary")
