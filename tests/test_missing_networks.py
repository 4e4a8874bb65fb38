"""What is no network is refused at the call, by the name of the argument."""

import pytest
import torch
from torch import nn

import enfold
from enfold.integrations.hub import save_pretrained

DATA = torch.randn(20, 4), torch.randint(3, (20,))
FUNCTIONS = {
    "evaluate": lambda model, path: enfold.evaluate(model, DATA),
    "fit": lambda model, path: enfold.fit(model, DATA, epochs=1),
    "calibrate": lambda model, path: enfold.calibrate(model, DATA),
    "threshold": lambda model, path: enfold.threshold(model, DATA),
    "save": lambda model, path: enfold.save(model, path / "net.safetensors"),
    "save_pretrained": lambda model, path: save_pretrained(model, path / "hub"),
    "export": lambda model, path: enfold.export(model, path / "net.onnx", DATA[0]),
    "symmetries": lambda model, path: enfold.symmetries(model, DATA[0]),
    "distill": lambda model, path: enfold.distill(model, DATA, epochs=1),
    "compress": lambda model, path: enfold.compress(model, DATA, DATA),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("model", [None, 3])
def test_functions_refuse_what_is_no_network(name, model, tmp_path):
    with pytest.raises(enfold.EnfoldError, match=r"(?s)(model|models|network|teacher) must be .* got (a )?(None|int)"):
        FUNCTIONS[name](model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_list_of_networks_is_no_model():
    with pytest.raises(enfold.EnfoldError, match=r"a list of 2 elements .* DeepEnsemble"):
        enfold.evaluate([nn.Linear(4, 3), nn.Linear(4, 3)], DATA)


@pytest.mark.parametrize("name", ["DeepEnsemble", "BatchEnsemble", "MIMO", "SWAG", "MixedEnsemble"])
def test_ensembles_refuse_none(name):
    with pytest.raises(enfold.EnfoldError, match=r"networks? must be given, got None"):
        getattr(enfold, name)(None)
