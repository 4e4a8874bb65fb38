"""Model soups: the mean of networks fine-tuned from one checkpoint: of all, of those that help, or weighted.

    uniform   θ = (1/M) Σ_m θ_m                                                                                   (1)
    greedy    in the order of the members' own validation scores: θ_m is added if the mean of what is in the soup (2)
              and θ_m scores at least as well as the soup did
    learned   θ = Σ_m α_m θ_m,  α = softmax(a),   min over a, β of  Σ_(x,y) CE(y, softmax(β f(x; θ)))             (3)

M. Wortsman, G. Ilharco, S. Y. Gadre, R. Roelofs, R. Gontijo-Lopes, A. S. Morcos, H. Namkoong, A. Farhadi, Y. Carmon,
S. Kornblith, L. Schmidt: Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time, ICML 2022, arXiv:2203.05482.

Greedy and learned soups look at the validation part alone, so a greedy soup is never worse on it than the best member;
of one ingredient, it is that member. What REPAIR aims at is weighted as the soup is.
Members that were trained apart are no ingredients: their units are in different orders (see weight_matching).

Differs from the paper: members may also be ordered by their NLL; batch-norm statistics are measured again on the
training part, or hidden units repaired, in a greedy soup before each taste; the temperature β is dropped after
training, as there is no place for it in the network. The learned soup's settings are those of the public code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.data import Data
from enfold.data.dataset import class_labels, evaluation_batches, has_examples
from enfold.engines.modes import evaluating
from enfold.engines.outputs import at_least_float32
from enfold.engines.skeleton import State
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError
from enfold.evaluate import member_logits, predict
from enfold.merge.common.base import Merge
from enfold.merge.common.folding import BufferMismatchWarning, note, require_data, require_members
from enfold.merge.common.states import mean_of, states_of
from enfold.merge.repair import corrected
from enfold.metrics import METRICS

Kind = Literal["uniform", "greedy", "learned"]
Score = Literal["accuracy", "nll"]


class SingleModelWarning(UserWarning):
    """A greedy soup has one ingredient."""


@dataclass(frozen=True)
class Soup(Merge):
    """The mean of members that were fine-tuned from one network."""

    kind: Kind = "greedy"  # all members (uniform), those that help (greedy), or with weights of their own (learned)
    score: Score = "accuracy"  # greedy: what is looked at on validation data, accuracy or nll
    epochs: int = 5  # learned: times through the validation part
    lr: float = 0.05  # learned: of AdamW
    batch_size: int = 256  # learned

    purpose: ClassVar[str] = "a soup"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 0 or self.batch_size < 1 or not 0 < self.lr < math.inf:
            raise EnfoldError(
                "a learned soup needs epochs of 0 or more, a batch_size of 1 or more and a lr above 0, got "
                f"{self.epochs}, {self.batch_size} and {self.lr}: 5, 256 and 0.05 are usual"
            )

    def __call__(
        self, members: Ensemble, data: Data, *, checkpoint: Path | None = None, answers: Path | None = None
    ) -> nn.Module:
        """One network; a soup of one ingredient is that member as it is."""
        members = require_members(members, self.purpose, averaged=self.kind != "uniform", data=data)
        require_data(data, self.purpose)
        if self.kind == "uniform" or members.num_members == 1:
            note(ingredients=_parts([1 / members.num_members] * members.num_members))
            return super().__call__(members, data)
        if not has_examples(data.val):
            raise EnfoldError(
                f"a {self.kind} soup is chosen on validation data, got none: pass a validation part, or use a uniform "
                "soup"
            )
        if self.kind == "greedy":
            chosen = self.ingredients(members, data)
            if len(chosen) == 1:
                warnings.warn(
                    f"the soup is member {chosen[0]} alone: with any other its validation {self.score} is worse, as of "
                    "members that were not fine-tuned from one network (see weight_matching)",
                    SingleModelWarning,
                    stacklevel=2,
                )
            network = self._of(chosen, members, data)
            note(ingredients=_parts([(k in chosen) / len(chosen) for k in range(members.num_members)]))
            return network
        weights = self.mixing_weights(members, data).tolist()
        note(ingredients=_parts(weights))
        network = members.network(mean_of(states_of(members), weights))  # (3)
        return corrected(network, members, data, self.repair, seed=self.seed, weights=weights).eval()

    def merged(self, members: Ensemble, data: Data, checkpoint: Path | None) -> State:
        """All members in equal parts, equation (1)."""
        return mean_of(states_of(members))

    def _of(self, ingredients: Sequence[int], members: Ensemble, data: Data) -> nn.Module:
        """The uniform soup of these members."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BufferMismatchWarning)  # it is told once, of all members
            return replace(self, kind="uniform")(members[ingredients], data)

    def ingredients(self, members: Ensemble, data: Data) -> list[int]:
        """The members in a greedy soup, in the order in which they were added, equation (2)."""

        def taste(*ingredients: int) -> float:
            """The validation score, the higher the better."""
            value = METRICS[self.score].function(predict(self._of(ingredients, members, data), data.val))
            return value if self.score == "accuracy" else -value

        alone = [taste(index) for index in range(members.num_members)]
        order = sorted(range(len(alone)), key=lambda index: -alone[index])
        chosen, best = [order[0]], alone[order[0]]
        for index in order[1:]:
            score = taste(*chosen, index)
            if score >= best:
                chosen, best = [*chosen, index], score
        return chosen

    def mixing_weights(self, members: Ensemble, data: Data) -> Tensor:
        """α of equation (3), (M,); members are in eval mode, so that nothing else moves."""
        stacked = {name: tensor.detach() for name, tensor in members.expand().items()}
        device = next(iter(stacked.values())).device
        raw = torch.zeros(members.num_members, device=device, requires_grad=True)
        beta = torch.ones((), device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([raw, beta], lr=self.lr, weight_decay=0.0)
        skeleton = members.skeleton
        with evaluating(skeleton.network):
            for _ in range(self.epochs):
                for inputs, labels in evaluation_batches(data.val, self.batch_size):
                    with torch.enable_grad(), skeleton.holding(_mixed(members, stacked, raw.softmax(0))) as network:
                        logits = at_least_float32(member_logits(network, inputs.to(device))[0])
                        classes = class_labels(labels, logits.shape[-1], "the validation part")
                        loss = F.cross_entropy(beta * logits, classes.to(device))  # (3)
                        raw.grad, beta.grad = torch.autograd.grad(loss, [raw, beta])
                    optimizer.step()
        return raw.detach().softmax(0)


def _parts(weights: Sequence[float]) -> dict[str, float]:
    """The members in a soup, by number, and their weights."""
    return {str(index): weight for index, weight in enumerate(weights) if weight}


def _mixed(members: Ensemble, stacked: State, weights: Tensor) -> State:
    """Σ_m α_m θ_m; statistics are mixed too, but tell nothing about the weights."""
    found: State = {}
    for name, tensor in stacked.items():
        given = weights if name in members.skeleton.parameters else weights.detach()
        mixed = tensor.is_floating_point()
        found[name] = torch.tensordot(given.to(tensor.dtype), tensor, dims=1) if mixed else tensor[0].clone()
    return found
