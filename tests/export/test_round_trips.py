"""Files are loaded by ONNX Runtime and torch.export alone, and compared with the model at other batch sizes."""

import copy

import pytest
import torch
from torch import nn

import enfold
from enfold.networks import MLP, ResNet
from enfold.tasks import Classification, Multilabel, Regression

ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SIZES = (1, 7, 12)
FORMATS = ("onnx", "pt2")


def run(path, inputs, names=None):
    """Return the named outputs of a file without enfold."""
    if path.suffix == ".pt2":
        with path.open("rb") as file:
            return dict(torch.export.load(file).module()(*inputs))
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = [each.name for each in session.get_inputs()]
    assert names is None or given == list(names)
    found = session.run(None, {name: value.numpy() for name, value in zip(given, inputs, strict=True)})
    return {each.name: torch.from_numpy(value) for each, value in zip(session.get_outputs(), found, strict=True)}


def rows(example, size):
    rng = torch.Generator().manual_seed(size)
    if example.is_floating_point():
        return torch.randn(size, *example.shape[1:], generator=rng)
    return example[torch.randint(len(example), (size,), generator=rng)]


def require_equal(path, expect, example, names=None):
    example = example if isinstance(example, tuple) else (example,)
    for size in SIZES:
        inputs = [rows(each, size) for each in example]
        found = run(path, inputs, names)
        with torch.no_grad():
            expected = expect(*inputs)
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, rtol=0, atol=1e-4), (name, size)


def classes(model):
    def expect(*inputs):
        found = model.predict(*inputs)
        return {
            "probabilities": found.mean,
            "entropy": found.entropy,
            "mutual_information": found.mutual_information,
        }

    return expect


def numbers(model):
    def expect(*inputs):
        found = model.predict(*inputs)
        return {"mean": found.mean, "aleatoric": found.aleatoric, "epistemic": found.epistemic}

    return expect


def mlp(outputs=5):
    return MLP(12, [16, 16], outputs)


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def vit():
    from enfold.networks import ViT

    return ViT((1, 8, 8), 5, patch=4, width=16, depth=2, heads=2)


IMAGES, ROWS = torch.randn(4, 1, 8, 8), torch.randn(4, 12)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("make", "example"),
    [
        (mlp, ROWS),
        pytest.param(cnn, IMAGES, marks=pytest.mark.slow),
        pytest.param(lambda: ResNet(in_channels=1, num_classes=5, depth=8), IMAGES, marks=pytest.mark.slow),
        pytest.param(vit, IMAGES, marks=pytest.mark.slow),
    ],
    ids=["mlp", "cnn", "resnet", "vit"],
)
def test_a_network_returns_its_logits(make, example, format, tmp_path):
    torch.manual_seed(0)
    network = make().eval()
    before = copy.deepcopy(network.state_dict())
    result = enfold.export(network, tmp_path / f"net.{format}", example, task="classification")
    require_equal(result.path, lambda x: {"logits": network(x)}, example)
    assert result.difference < 1e-4
    assert result.agreement == 1.0
    assert result.size == result.path.stat().st_size
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert [each.name for each in tmp_path.iterdir()] == [result.path.name]


ENSEMBLES = {
    "DeepEnsemble": lambda: enfold.DeepEnsemble(mlp, 4),
    "BatchEnsemble": lambda: enfold.BatchEnsemble(mlp(), 4),
    "MIMO": lambda: enfold.MIMO(mlp(), 3),
    "MixedEnsemble": lambda: enfold.MixedEnsemble([mlp(), nn.Sequential(nn.Linear(12, 5))]),
}
MORE = {
    "weighted": lambda: enfold.DeepEnsemble([mlp() for _ in range(3)], weights=(0.7, 0.2, 0.1)),
    "MixtureEnsemble": lambda: enfold.MixtureEnsemble(mlp(), 4),
    "TreeNet": lambda: enfold.TreeNet(mlp(), 3),
    "MultiHead": lambda: enfold.MultiHead(mlp(), 3),
    "PackedEnsemble": lambda: enfold.PackedEnsemble(mlp(), 4),
    "Masksembles": lambda: enfold.Masksembles(mlp(), 4),
    "LoRAEnsemble": lambda: enfold.LoRAEnsemble(mlp(), 3),
    "HyperBatchEnsemble": lambda: enfold.HyperBatchEnsemble(mlp(), 3),
    "FiLMEnsemble": lambda: enfold.FiLMEnsemble(cnn(), 3),
    "DirichletEnsemble": lambda: enfold.DirichletEnsemble(enfold.DeepEnsemble(mlp, 2), 1.0),
}
QUICK = (("DeepEnsemble", "onnx"), ("MIMO", "pt2"), ("BatchEnsemble", "pt2"))
CASES = [
    pytest.param(make, format, marks=() if (name, format) in QUICK else pytest.mark.slow, id=f"{name}-{format}")
    for name, make in ENSEMBLES.items()
    for format in FORMATS
]
CASES += [pytest.param(make, "onnx", marks=pytest.mark.slow, id=name) for name, make in MORE.items()]


@pytest.mark.filterwarnings("ignore:.*of the parameters")
@pytest.mark.parametrize(("make", "format"), CASES)
def test_an_ensemble_returns_probabilities_and_uncertainty(make, format, tmp_path):
    torch.manual_seed(0)
    ensemble = make().eval()
    example = IMAGES if isinstance(ensemble, enfold.FiLMEnsemble) else ROWS
    result = enfold.export(ensemble, tmp_path / f"ensemble.{format}", example)
    require_equal(result.path, classes(ensemble), example)
    assert result.agreement == 1.0


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "pt2"])
def test_a_calibrated_ensemble_includes_its_temperature(format, tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(mlp, 2)
    calibrated = enfold.Calibrated(ensemble, Classification(), 2.5).eval()
    path = enfold.export(calibrated, tmp_path / f"calibrated.{format}", ROWS).path
    require_equal(path, classes(calibrated), ROWS)
    inputs = rows(ROWS, 9)
    assert not torch.allclose(run(path, [inputs])["entropy"], ensemble.predict(inputs).entropy, atol=1e-3)


def test_a_dirichlet_network_has_the_uncertainty_of_its_distribution(tmp_path):
    torch.manual_seed(0)
    student = enfold.Dirichlet(mlp(), 1.0).eval()
    path = enfold.export(student, tmp_path / "student.pt2", ROWS).path

    def expect(inputs):
        found = student.uncertainties(inputs)
        return {
            "probabilities": torch.softmax(student(inputs), -1),
            "entropy": found["total"].float(),
            "mutual_information": found["epistemic"].float(),
        }

    require_equal(path, expect, ROWS)


@pytest.mark.parametrize(
    ("task", "outputs"),
    [
        (Regression(head="gaussian", variance="softplus"), 2),
        pytest.param(Regression(head="uncertainty", variance="log"), 3, marks=pytest.mark.slow),
        pytest.param(Regression(quantiles=(0.1, 0.5, 0.9)), 3, marks=pytest.mark.slow),
        pytest.param(Regression(), 2, marks=pytest.mark.slow),
    ],
    ids=["gaussian", "uncertainty", "quantiles", "point"],
)
@pytest.mark.parametrize("format", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_regression_ensemble_returns_mean_and_variances(task, outputs, format, tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(lambda: mlp(outputs), 3).eval()
    ensemble.task = task
    result = enfold.export(ensemble, tmp_path / f"numbers.{format}", ROWS)
    require_equal(result.path, numbers(ensemble), ROWS)
    assert result.agreement is None


@pytest.mark.slow
def test_labels_have_a_probability_each(tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(mlp, 2).eval()
    ensemble.task = Multilabel(num_labels=5)
    path = enfold.export(ensemble, tmp_path / "labels.pt2", ROWS).path
    found = run(path, [rows(ROWS, 6)])
    assert found["probabilities"].shape == found["entropy"].shape == (6, 5)
    expected = ensemble.predict(rows(ROWS, 6))
    assert torch.allclose(found["probabilities"], expected.mean, atol=1e-5)
    assert torch.allclose(found["mutual_information"], expected.epistemic, atol=1e-5)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.table = nn.Conv2d(1, 4, 3), nn.Linear(6, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, image, table):
        return self.head(torch.cat([self.image(image).mean((2, 3)), self.table(table)], 1).relu())


@pytest.mark.parametrize("as_dict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_inputs_have_the_names_of_the_arguments(as_dict, tmp_path):
    torch.manual_seed(0)
    network = TwoInputs().eval()
    example = {"image": IMAGES, "table": torch.randn(4, 6)} if as_dict else (IMAGES, torch.randn(4, 6))
    format = "onnx" if as_dict else "pt2"
    result = enfold.export(network, tmp_path / f"two.{format}", example)
    assert list(result.inputs) == ["image", "table"]
    names = None if format == "pt2" else ["image", "table"]
    require_equal(result.path, lambda i, t: {"outputs": network(i, t)}, (IMAGES, torch.randn(4, 6)), names)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_encoder_of_transformers_takes_its_dictionary(format, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(lambda: transformers.BertForSequenceClassification(config), 2).eval()
    example = {"input_ids": torch.randint(50, (4, 9)), "attention_mask": torch.ones(4, 9, dtype=torch.long)}
    example["attention_mask"][2:, 6:] = 0
    result = enfold.export(ensemble, tmp_path / f"bert.{format}", example)
    assert list(result.inputs) == ["input_ids", "attention_mask"]
    require_equal(
        result.path,
        lambda ids, mask: named(ensemble, ids, mask),
        (example["input_ids"], example["attention_mask"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_texts_of_any_length(format, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    torch.manual_seed(0)
    network = transformers.BertForTokenClassification(config).eval()
    example = {"input_ids": torch.randint(50, (4, 12)), "attention_mask": torch.ones(4, 12, dtype=torch.long)}
    axes = {name: {1: "tokens"} for name in example}
    result = enfold.export(network, tmp_path / f"bert.{format}", example, dynamic_axes=axes)
    assert result.inputs["input_ids"]["shape"] == ["batch", "tokens"]
    assert result.outputs["outputs"]["shape"] == ["batch", "tokens", 3]
    if format == "onnx":
        entry = ort.InferenceSession(result.path, providers=["CPUExecutionProvider"]).get_inputs()[1]
        assert entry.shape == ["batch", "tokens"]
    for size, length in ((1, 7), (3, 30), (12, 5)):
        ids, mask = torch.randint(50, (size, length)), torch.ones(size, length, dtype=torch.long)
        mask[:, length - 2 :] = 0
        with torch.no_grad():
            expected = network(ids, attention_mask=mask).logits
        assert torch.allclose(run(result.path, [ids, mask])["outputs"], expected, rtol=0, atol=1e-4)


class Counting(nn.Module):
    """A network that asks for the number of examples by `len`, as attention of several packages does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 10)

    def forward(self, inputs):
        return self.layer(inputs).reshape(len(inputs), 2, 5).mean(1)


@pytest.mark.parametrize("format", [pytest.param("onnx", marks=pytest.mark.slow), "pt2"])
def test_len_of_a_tensor_is_no_constant(format, tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(Counting, 2).eval()
    path = enfold.export(ensemble, tmp_path / f"net.{format}", ROWS).path
    require_equal(path, classes(ensemble), ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_quantiles_of_a_tabular_transformer(format, tmp_path):
    rtdl = pytest.importorskip("rtdl_revisiting_models")

    def make():
        settings = rtdl.FTTransformer.get_default_kwargs(1)
        return rtdl.FTTransformer(n_cont_features=4, cat_cardinalities=[3, 5], d_out=3, **settings)

    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(make, 2).eval()
    ensemble.task = Regression(quantiles=(0.1, 0.5, 0.9))
    example = (torch.randn(4, 4), torch.randint(3, (4, 2)))
    path = enfold.export(ensemble, tmp_path / f"net.{format}", example).path
    require_equal(path, numbers(ensemble), example)


def test_images_of_any_size(tmp_path):
    torch.manual_seed(0)
    network = cnn().eval()
    axes = {"input": {2: "height", 3: "width"}}
    result = enfold.export(network, tmp_path / "cnn.pt2", torch.randn(4, 1, 16, 16), dynamic_axes=axes)
    assert result.inputs["input"]["shape"] == ["batch", 1, "height", "width"]
    assert result.outputs["outputs"]["shape"] == ["batch", 5]
    whole = UNet().eval()
    path = tmp_path / "unet.pt2"
    found = enfold.export(whole, path, torch.randn(4, 1, 16, 16), dynamic_axes=axes).outputs["outputs"]["shape"]
    assert found == ["batch", 3, "height", "width"]
    images = torch.randn(7, 1, 14, 22)
    assert torch.allclose(run(path, [images])["outputs"], whole(images), rtol=0, atol=1e-4)
    assert torch.allclose(run(result.path, [images])["outputs"], network(images), rtol=0, atol=1e-4)


def named(ensemble, ids, mask):
    found = ensemble.predict(input_ids=ids, attention_mask=mask)
    return {"probabilities": found.mean, "entropy": found.entropy, "mutual_information": found.mutual_information}


class UNet(nn.Module):
    """Two levels with a skip connection: (B, 1, H, W) -> (B, 3, H, W)."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, image):
        first = self.norm(self.first(image)).relu()
        below = self.down(nn.functional.max_pool2d(first, 2)).relu()
        return self.last(torch.cat([first, self.up(below)], 1))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_unet_has_classes_of_pixels(format, tmp_path):
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(UNet, 2).eval()
    ensemble.task = Classification(class_axis=1)
    result = enfold.export(ensemble, tmp_path / f"unet.{format}", torch.randn(3, 1, 16, 16))
    assert result.outputs["probabilities"]["shape"] == ["batch", 3, 16, 16]
    assert result.outputs["mutual_information"]["shape"] == ["batch", 16, 16]
    require_equal(result.path, classes(ensemble), torch.randn(3, 1, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_a_unet_of_monai_has_probabilities_of_pixels(format, tmp_path):
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    ensemble = enfold.DeepEnsemble(lambda: nets.UNet(2, 1, 3, channels=(4, 8, 16), strides=(2, 2)), 2).eval()
    ensemble.task = Classification(class_axis=1)
    example = torch.randn(3, 1, 16, 16)
    result = enfold.export(ensemble, tmp_path / f"unet.{format}", example)
    assert result.outputs["probabilities"]["shape"] == ["batch", 3, 16, 16]
    assert result.outputs["entropy"]["shape"] == ["batch", 16, 16]
    require_equal(result.path, classes(ensemble), example)


def test_a_trained_network_and_a_student_export_logits(tmp_path):
    """They remember the task that they were trained for."""
    torch.manual_seed(0)
    inputs, labels = torch.randn(32, 12), torch.arange(32) % 5
    ensemble = enfold.DeepEnsemble(mlp, 2)
    enfold.fit(ensemble, (inputs, labels), epochs=1, quiet=True)
    student = enfold.distill(ensemble, (inputs, labels), epochs=1, quiet=True)
    for network in (student, ensemble.member(0)):
        result = enfold.export(network, tmp_path / "net.pt2", inputs)
        assert list(result.outputs) == ["logits"]


def test_bytes_are_normalised_in_the_graph(tmp_path):
    torch.manual_seed(0)
    network = cnn().eval()
    pixels = torch.randint(0, 256, (20, 1, 8, 8), dtype=torch.uint8)
    result = enfold.export(network, tmp_path / "bytes.pt2", pixels, preprocess=((0.3,), (0.2,)))
    assert result.inputs["input"]["dtype"] == "uint8"
    found = run(result.path, [pixels])["outputs"]
    assert torch.allclose(found, network((pixels.float() / 255 - 0.3) / 0.2), atol=1e-5)


def test_preprocessing_of_a_data_set(tmp_path):
    data = enfold.data.load("fashion-mini")
    torch.manual_seed(0)
    network = MLP(784, [8], 10).eval()
    raw = data.test.inputs[:16]
    path = enfold.export(network, tmp_path / "fashion.pt2", raw, preprocess=data).path
    assert torch.allclose(run(path, [raw])["outputs"], network(data.prepare(raw)), atol=1e-5)


def test_safetensors_holds_the_values(tmp_path):
    from safetensors.torch import load_file

    network = mlp()
    result = enfold.export(network, tmp_path / "net.safetensors")
    stored = load_file(result.path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in network.state_dict().items())
    assert result.format == "safetensors"


def test_predictions_of_a_single_network(tmp_path):
    torch.manual_seed(0)
    network = mlp().eval()
    path = enfold.export(network, tmp_path / "net.pt2", ROWS, outputs="prediction").path
    found = run(path, [rows(ROWS, 6)])
    assert list(found) == ["probabilities", "entropy"]
    assert torch.allclose(found["probabilities"], torch.softmax(network(rows(ROWS, 6)), -1), atol=1e-6)


@pytest.mark.slow
def test_a_common_trunk_is_stored_once(tmp_path):
    wide = MLP(12, [256, 16], 5)
    ensemble = enfold.TreeNet(wide, 8, split="head").eval()
    size = enfold.export(ensemble, tmp_path / "tree.pt2", ROWS).size
    alone = enfold.export(wide, tmp_path / "alone.pt2", ROWS).size
    assert size < 2.5 * alone + 60_000


def test_the_example_may_be_an_array(tmp_path):
    ensemble = enfold.DeepEnsemble(lambda: nn.Linear(6, 3), 2)
    example = torch.randn(8, 6)
    enfold.export(ensemble, tmp_path / "net.onnx", example=example.double().numpy())
    require_equal(tmp_path / "net.onnx", classes(ensemble), example)
