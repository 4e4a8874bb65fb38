"""Tuples, dictionaries, keywords and nested trees of inputs: the engines give the results of the members' networks."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold import BatchEnsemble, DeepEnsemble
from enfold.data.tree import map_tensors, tensors
from enfold.engines.base import Loop
from enfold.engines.call import call_network
from enfold.engines.stacked import StackedProgram
from enfold.errors import EnfoldError


class TwoTowers(nn.Module):
    """Two vectors, and an optional weight of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        features = torch.cat([self.first(x).tanh(), self.second(y)], dim=-1)
        return self.head(features if weight is None else features * weight)


class Nested(TwoTowers):
    def forward(self, batch: dict[str, tuple[Tensor, Tensor]]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["pair"][0], *batch["others"])


class Images(nn.Module):
    """An image and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(self.conv(image)).relu().mean((2, 3)), vector], 1))


class Encoder(nn.Module):
    """A transformer layer on a dictionary of tokens and their mask, which reads the sizes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.out = nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        size, length = input_ids.shape
        x = self.tokens(input_ids)
        q, k, v = self.mix(x).chunk(3, -1)
        q, k, v = (part.view(size, length, 2, 8).transpose(1, 2) for part in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask[:, None, None, :].bool())
        return self.head(self.norm(x + self.out(seen.transpose(1, 2).reshape(size, length, 16)))[:, 0])


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def text(size: int) -> dict[str, Tensor]:
    mask = (torch.arange(7) < 1 + torch.arange(size)[:, None] % 7).long()
    return {"input_ids": torch.arange(size * 7).view(size, 7) * 13 % 20, "attention_mask": mask}


X, Y, W = draw(5, 6), draw(5, 4), draw(5, 1)
CASES = {
    "a tuple": (TwoTowers, (X, Y), StackedProgram),
    "a dictionary": (TwoTowers, {"y": Y, "x": X}, StackedProgram),
    "three inputs": (TwoTowers, {"x": X, "y": Y, "weight": W}, StackedProgram),
    "an entry that is None": (TwoTowers, {"x": X, "y": Y, "weight": None}, StackedProgram),
    "a nested tree": (Nested, {"pair": (X, Y), "others": [Y, W]}, StackedProgram),
    "images": (Images, (draw(5, 1, 4, 4), draw(5, 4)), Loop),
    "tokens and their mask": (Encoder, text(5), StackedProgram),
}


def compare_with_networks(members: DeepEnsemble, inputs: object) -> None:
    """Compare outputs and the gradients of parameters and inputs with those of the members' own networks."""
    networks = members.networks()
    given, own = (map_tensors(lambda t: t.clone().requires_grad_(t.is_floating_point()), inputs) for _ in range(2))
    expected = torch.stack([call_network(network, own) for network in networks])
    outputs = members(given)
    torch.testing.assert_close(outputs, expected)
    weights = draw(*expected.shape)
    members.zero_grad()
    outputs.backward(weights)
    expected.backward(weights)
    for one, other in zip(tensors(given), tensors(own), strict=True):
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad)
    gradients = {name: parameter.grad for name, parameter in members.named_parameters()}
    for name in dict(networks[0].named_parameters()):
        found = next(gradient for key, gradient in gradients.items() if key.endswith(name))
        torch.testing.assert_close(found, torch.stack([dict(n.named_parameters())[name].grad for n in networks]))


@pytest.mark.combinations
@pytest.mark.parametrize("engine", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_networks(name, engine):
    make, inputs, kind = CASES[name]
    if make is Encoder and engine == "vmap":
        pytest.skip("torch.vmap warns that it has no rule for this attention")
    members = DeepEnsemble(make, 4, engine=engine).eval()
    compare_with_networks(members, inputs)
    if engine == "auto":
        assert type(members.choose_engine(inputs)) is kind


def test_keywords_and_tuples_are_traced_separately():
    members = DeepEnsemble(TwoTowers, 4)
    expected = torch.stack([network(X, Y) for network in members])
    for outputs in (members(X, Y), members((X, Y)), members(x=X, y=Y), members({"y": Y, "x": X})):
        torch.testing.assert_close(outputs, expected)
    assert all(isinstance(members.choose_engine(given), StackedProgram) for given in ((X, Y), {"x": X, "y": Y}))
    weighted = {"x": X, "y": Y, "weight": W}
    torch.testing.assert_close(members(weighted), torch.stack([network(**weighted) for network in members]))
    assert members.choose_engine((X, Y)) is not members.choose_engine(weighted)
    assert members.choose_engine(weighted) is members.choose_engine(weighted)


def test_inputs_without_a_row_for_each_example_run_in_the_loop():
    """A weight of each feature looks like the weights of 4 members, merged."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.layer(x) * scale

    for scales in ([draw(5, 1), draw(1)], [draw(1), draw(5, 1)], [draw(5, 4), draw(4)]):
        members = DeepEnsemble(Scaled, 4)
        for scale in scales:
            expected = torch.stack([network(X, scale) for network in members])
            torch.testing.assert_close(members(X, scale), expected)


def test_an_input_that_mixes_examples_is_detected():
    class Centred(TwoTowers):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, y - y.mean(0))

    class Centred2(TwoTowers):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            features = self.second(y)
            return self.head(torch.cat([self.first(x), features.roll(1, 0)], -1))

    for make in (Centred, Centred2):
        members = DeepEnsemble(make, 4)
        torch.testing.assert_close(members(X, Y), torch.stack([network(X, Y) for network in members]))
    with pytest.raises(EnfoldError, match="stacked"):
        DeepEnsemble(Centred2, 4, engine="stacked")(X, Y)


def test_efficient_ensembles_run_structures():
    members = BatchEnsemble(TwoTowers(), 4)
    with torch.no_grad():
        for parameter in members.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    expected = torch.stack([network(X, Y) for network in members])
    torch.testing.assert_close(members(X, Y), expected)
    torch.testing.assert_close(members.eval()(X, Y), expected)


@pytest.mark.parametrize("name", ["a tuple", "tokens and their mask"])
def test_threads_may_use_several_structures(name):
    members = DeepEnsemble(CASES[name][0], 4).eval()
    networks = members.networks()
    if name == "a tuple":
        given = [(X, Y), {"x": X, "y": Y}, (X, Y, W), (X[:2], Y[:2])]
    else:
        given = [text(5), text(3), dict(reversed(text(4).items())), text(1)]
    expected = [torch.stack([call_network(network, each) for network in networks]).detach() for each in given]
    wrong: list[object] = []

    def call(start: int) -> None:
        try:
            for step in range(40):
                index = (start + step) % len(given)
                with torch.set_grad_enabled(step % 2 == 0):
                    if not torch.allclose(members(given[index]), expected[index], atol=1e-5):
                        wrong.append(index)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.slow
def test_a_transformer_of_another_package_runs():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    members = DeepEnsemble(lambda: transformers.BertForSequenceClassification(config), 4).eval()
    expected = torch.stack([network(**text(5)).logits for network in members])
    torch.testing.assert_close(members(text(5)), expected, rtol=1e-4, atol=1e-5)
