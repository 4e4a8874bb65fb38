"""Hugging Face Hub: a distilled network as a folder with a model card, loaded with enfold and without it."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import enfold
from enfold.integrations.hub import from_pretrained, save_pretrained


class Net(nn.Module):
    """A class of the user."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of digits."""
        return self.head(torch.relu(self.hidden(images.flatten(1))))


def main() -> None:
    """Train, distil, save and load."""
    data = enfold.data.load("digits")
    ensemble = enfold.DeepEnsemble(Net, 3)
    enfold.fit(ensemble, data, epochs=10, lr=1e-2, quiet=True)
    net = enfold.distill(ensemble, data, epochs=10, lr=1e-2, quiet=True)
    row = enfold.evaluate(net, data, reference=ensemble, name="distilled")
    print(enfold.evaluate(ensemble, data, name="ensemble"))
    print(row)

    with tempfile.TemporaryDirectory() as temporary:
        about = {"dataset": "digits", "pipeline_tag": "image-classification", "license": "mit"}
        folder = save_pretrained(net, Path(temporary) / "digits-net", metrics=row, **about)
        print("files:", ", ".join(sorted(path.name for path in folder.iterdir())))
        print("\n".join((folder / "README.md").read_text().splitlines()[:7]))
        loaded = from_pretrained(folder, Net)

        plain = Net()  # anybody who has the class needs no enfold
        plain.load_state_dict(load_file(folder / "model.safetensors"))

        calibrated = save_pretrained(enfold.calibrate(ensemble, data.val), Path(temporary) / "digits-ensemble")
        uncertainty = from_pretrained(calibrated, Net).predict(data.prepare(data.test.inputs[:3])).total

    images = data.prepare(data.test.inputs[:100])
    print("equal outputs:", torch.equal(loaded(images), net(images)), torch.equal(plain(images), net(images)))
    print("uncertainty of the calibrated ensemble (nats):", [round(value, 3) for value in uncertainty.tolist()])


if __name__ == "__main__":
    main()
