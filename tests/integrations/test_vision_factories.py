"""Networks of timm and torchvision as members; skipped where torchvision's binary is not that of torch."""

import copy
import importlib
import sys

import pytest
import torch

import enfold
from enfold.errors import EnfoldError, MissingExtra
from tools.zoo.entry import declare_operators

declare_operators()
pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES, LABELS = torch.rand(8, 3, 32, 32), torch.arange(8) % 4


@pytest.fixture(params=["timm", "torchvision"])
def module(request):
    pytest.importorskip(request.param)
    return pytest.importorskip(f"enfold.integrations.{request.param}")


def test_members_are_trained_and_exported_with_the_published_normalization(module, tmp_path):
    make = module.ModelFactory("resnet18", num_classes=4)
    make = copy.deepcopy(make)
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(make, 2)
    enfold.fit(ensemble, (IMAGES, LABELS), epochs=1, batch_size=4, select="last", quiet=True)
    mean, std = make.normalization
    assert len(mean) == len(std) == 3
    path = tmp_path / "net.pt2"
    enfold.export(ensemble, path, IMAGES, preprocess=make.normalization)
    with path.open("rb") as file:
        found = torch.export.load(file).module()(IMAGES[:7])["probabilities"]
    shape = (1, 3, 1, 1)
    normalized = (IMAGES[:7] - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
    assert torch.allclose(found, ensemble.predict(normalized).mean, atol=1e-4)


def test_an_unknown_network_is_named_with_the_nearest(module):
    with pytest.raises(EnfoldError, match=r"got 'resnet19', did you mean 'resnet\d\d'"):
        module.ModelFactory("resnet19")
    assert repr(module.ModelFactory("resnet18", num_classes=4)) == "ModelFactory('resnet18', num_classes=4)"


def test_unknown_weights_are_named():
    pytest.importorskip("torchvision")
    from enfold.integrations.torchvision import ModelFactory

    with pytest.raises(EnfoldError, match=r"IMAGENET1K_V1.*got 'imagenet'"):
        ModelFactory("resnet18", weights="imagenet")


def test_a_package_that_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text(
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ImportError('no') from e\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.delitem(sys.modules, "enfold.integrations.timm", raising=False)
    with pytest.raises(
        MissingExtra, match=r"installed, but cannot be imported \(ZeroDivisionError: division by zero\)"
    ):
        importlib.import_module("enfold.integrations.timm")


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_missing_package_is_named_with_its_install_line(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"enfold.integrations.{package}", raising=False)
    with pytest.raises(MissingExtra, match=rf"pip install 'enfold\[{package}\]'"):
        importlib.import_module(f"enfold.integrations.{package}")
