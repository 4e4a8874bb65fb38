"""DICE: members whose outputs share no more than the class, by an adversary that estimates what they share.

    z_i = f_i(x) + σ ε,   ε ~ N(0, 1)                                                                   (1)
    L_i = CE(y, z_i) + β ||f_i(x) - c_i(y)||² / (2 σ²) + δ / (2 (M - 1)) Σ_{j ≠ i} I(z_i; z_j | y)        (2)
    I(z_i; z_j | y) ≈ E_joint[t] - ln E_product[e^t],   t = t(z_i, z_j, y)                              (3)

    joint    z_i(x), z_j(x), y of the same example
    product  z_i(x), z_j(x'), y of two examples of one class

A. Ramé, M. Cord: DICE: Diversity in Deep Ensembles via Conditional Redundancy Adversarial Estimation, ICLR 2021,
arXiv:2101.05544.

The second term of (2) is the conditional entropy bottleneck KL(N(f_i(x), σ²) || N(c_i(y), σ²)), with a centre c_i(y)
for each class. The last one is the conditional redundancy, by the bound (3) of Donsker and Varadhan: t is the logit of
a critic that is trained in turn with the members to tell joint from product samples. One critic, a perceptron, serves
all pairs i < j, which it is told. Half of the term of a pair is counted for each of its members. After training,
members are the plain networks f_i; critic and centres are in checkpoints of the training only.

Differs from the paper: z are the outputs of the network, so that any network can be a member, not features with a
classifier on top, and σ is fixed. Critic and centres have one step of Adam for each step of the members; t is limited
to ±10. The weights β and δ, which the paper tunes for each network, have defaults of our own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.data import Data
from enfold.data.batches import Batch, Order
from enfold.data.dataset import length
from enfold.engines.base import EngineName
from enfold.engines.modes import eval_mode
from enfold.ensembles.common.efficient import refuse_ties
from enfold.ensembles.common.options import NonNegative
from enfold.ensembles.deep_ensemble import DeepEnsemble, Factory
from enfold.errors import EnfoldError
from enfold.seeds import generator
from enfold.tasks import as_task
from enfold.train import TrainConfig
from enfold.train.objective import Objective, TaskLoss, batch_outputs, default_loss
from enfold.train.optimize import Optimizer

LIMIT = 10.0  # of t
ROWS = 1024  # pixels or tokens that are compared in a step
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam


@checked
class DICE(DeepEnsemble):
    """Members whose outputs share no more than the class.

    Args:
        network: The network, or a function that makes one.
        num_members: The number of members.
        redundancy: δ: the weight of the conditional redundancy.
        bottleneck: β: the weight of the bottleneck.
        noise: σ: the standard deviation of the noise on the outputs in training.
        width: The number of hidden units in each of the two layers of the critic.
        critic_rate: The learning rate of Adam for critic and centres.
        seed: The seed of the members' initialisation and of the critic.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module | Factory,
        num_members: PositiveInt = 4,
        *,
        redundancy: NonNegative = 0.1,
        bottleneck: NonNegative = 1e-3,
        noise: NonNegative = 1.0,
        width: PositiveInt = 64,
        critic_rate: NonNegative = 1e-3,
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if bottleneck and not noise:
            raise EnfoldError("noise must be positive with a bottleneck, which is relative to it, got 0: change one")
        if isinstance(network, nn.Module):
            refuse_ties(network)
        super().__init__(network, num_members, seed=seed, engine=engine)
        self.redundancy, self.bottleneck, self.noise = redundancy, bottleneck, noise
        self.width, self.critic_rate = width, critic_rate
        self.critic: Critic | None = None  # during a training
        self.seen: list[Tensor] = []  # samples (M, B, C) and classes (B,) of the step under way

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train all members on the same batches, to the last epoch, as members depend on each other."""
        if config.bootstrap or config.folds is not None or config.order == "split":
            raise EnfoldError(
                "DICE compares members on the same batch, got bootstrap, folds or order='split': leave them out"
            )
        if config.patience is not None:
            raise EnfoldError(
                f"patience must be None for members that depend on each other, got {config.patience}: leave it out"
            )
        return config.replace(order="shared", select="last")

    def objective(self, config: TrainConfig) -> Objective | None:
        """Return (2)."""
        return DiceLoss(default_loss(config, self.num_members), self.redundancy, self.bottleneck, self.noise, self.seen)

    def on_fit_start(self, data: Data, config: TrainConfig) -> None:
        """Make a new critic."""
        if length(data.train) is None:
            raise EnfoldError(
                "train must have a length for DICE, which makes its critic for the first batch, got a loader without "
                "one: pass tensors, a Dataset or a DataLoader"
            )
        batch = next(iter(Order(config.batch_size, seed=config.seed).batches(data, epoch=0))).to(config.device)
        with torch.no_grad(), eval_mode(self):
            _, logits = class_rows(default_loss(config, self.num_members), batch, batch_outputs(self, batch))
        device = next(self.parameters()).device
        self.critic = Critic(self.num_members, logits.shape[-1], self.width, self.seed).to(device)

    def on_step_end(self, step: int, optimizer: Optimizer) -> None:
        """Take a step of the critic and the centres."""
        if self.seen and self.critic is not None:
            samples, classes = self.seen
            self.critic.learn(samples, classes, self.critic_rate)
            self.seen.clear()

    def on_fit_end(self, data: Data) -> None:
        """Discard the critic."""
        self.critic = None
        self.seen.clear()


class Critic(nn.Module):
    """The critic of all pairs of members, the centres of the classes, and the state of their optimizer, as buffers.

    Args:
        num_members: M.
        classes: C, the number of outputs.
        width: The number of hidden units.
        seed: The seed of the initial values.
    """

    values: Tensor
    moments: Tensor
    steps: Tensor

    def __init__(self, num_members: int, classes: int, width: int, seed: int) -> None:
        super().__init__()
        self.pairs = list(combinations(range(num_members), 2))
        inputs = 3 * classes + len(self.pairs)
        self.shapes = [(width, inputs), (width,), (width, width), (width,), (1, width), (1,)]
        source, drawn = generator(seed, "dice", "critic"), []
        for shape in self.shapes:
            spread = math.sqrt(2 / shape[-1]) if len(shape) > 1 else 0.0
            drawn.append(spread * torch.randn(shape, generator=source))
        self.shapes.append((num_members, classes, classes))  # the centres, which start at 0
        drawn.append(torch.zeros(self.shapes[-1]))
        values = torch.cat([each.flatten() for each in drawn])
        self.register_buffer("values", values)
        self.register_buffer("moments", torch.zeros(2, len(values)))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def parts(self, values: Tensor | None = None) -> list[Tensor]:
        """Return weights and biases of the critic, and the centres (M, C, C)."""
        sizes = [math.prod(shape) for shape in self.shapes]
        split = (self.values if values is None else values).split(sizes)
        return [part.view(shape) for part, shape in zip(split, self.shapes, strict=True)]

    def logits(self, samples: Tensor, classes: Tensor, partner: Tensor, values: Tensor | None = None) -> Tensor:
        """Return t of all pairs for z_i(x) and z_j(x'), (pairs, B).

        Args:
            samples: z of all members, (M, B, C).
            classes: y, (B,).
            partner: The index of x' for each x, (B,).
            values: The weights; by default the present ones.
        """
        first, second = (samples[[pair[side] for pair in self.pairs]] for side in (0, 1))
        label = F.one_hot(classes, samples.shape[-1]).to(samples).expand(len(self.pairs), -1, -1)
        which = torch.eye(len(self.pairs)).to(samples)[:, None].expand(-1, len(classes), -1)
        hidden = torch.cat([first, second[:, partner], label, which], dim=-1)
        w1, b1, w2, b2, w3, b3, _ = self.parts(values)
        hidden = F.leaky_relu(F.linear(F.leaky_relu(F.linear(hidden, w1, b1)), w2, b2))
        return F.linear(hidden, w3, b3).squeeze(-1).clamp(-LIMIT, LIMIT)

    def redundancy(self, samples: Tensor, classes: Tensor) -> Tensor:
        """Return (3) of every pair, (pairs,)."""
        kept, partner = other_of_class(classes)
        if not len(kept):
            return samples.new_zeros(len(self.pairs))
        samples, classes = samples[:, kept], classes[kept]
        joint = self.logits(samples, classes, torch.arange(len(kept), device=kept.device))
        product = self.logits(samples, classes, partner)
        return joint.mean(1) - torch.logsumexp(product, 1) + math.log(len(kept))

    def distances(self, outputs: Tensor, classes: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the mean squared distance of each member's outputs from the centres, (M,)."""
        return (outputs - self.parts(values)[-1][:, classes]).square().sum(-1).mean(1)

    def loss(self, samples: Tensor, classes: Tensor, values: Tensor | None = None) -> Tensor:
        """Return the cross-entropy of joint against product samples, and the distance from the centres."""
        total = self.distances(samples, classes, values).mean()
        kept, partner = other_of_class(classes)
        if self.pairs and len(kept):
            samples, classes = samples[:, kept], classes[kept]
            joint = self.logits(samples, classes, torch.arange(len(kept), device=kept.device), values)
            product = self.logits(samples, classes, partner, values)
            total = total + F.softplus(-joint).mean() + F.softplus(product).mean()
        return total

    def learn(self, samples: Tensor, classes: Tensor, rate: float) -> None:
        """Take one step of Adam."""
        with torch.enable_grad():
            values = self.values.detach().clone().requires_grad_()
            gradient = torch.autograd.grad(self.loss(samples, classes, values), values)[0]
        with torch.no_grad():
            self.steps += 1
            count, (first, second) = int(self.steps), self.moments
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            size = (second / (1 - BETAS[1] ** count)).sqrt() + EPSILON
            self.values -= rate * first / (1 - BETAS[0] ** count) / size


def other_of_class(classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples that share their class with others, and for each the place of the next one of its class.

    Args:
        classes: (B,).

    Returns:
        The indices of these examples, (K,), and for each the place of its partner among them, (K,).
    """
    kept = (classes[:, None] == classes).sum(1).gt(1).nonzero()[:, 0]
    order = classes[kept].argsort(stable=True)
    ranked = classes[kept][order]
    counts = torch.unique_consecutive(ranked, return_counts=True)[1].tolist()
    partner = torch.empty_like(kept)
    for group in order.split(counts):
        partner[group] = group.roll(-1)
    return kept, partner


def class_rows(loss: TaskLoss, batch: Batch, *outputs: Tensor) -> tuple[Tensor, ...]:
    """Return the classes (R,) and the logits (M, R, C) of these outputs; of many pixels or tokens a random part.

    Raises:
        EnfoldError: If the task has no classes.
    """
    task = as_task(loss.task).resolve(outputs[0], batch.targets)
    if not task.is_categorical:
        raise EnfoldError(
            f"DICE compares examples of one class, got task='{task.name}': use RepulsiveEnsemble for other tasks"
        )
    rows = [task.flatten(each, batch.targets) for each in outputs]
    classes, values = rows[0].targets.long(), [each.values for each in rows]
    if len(classes) > max(ROWS, len(batch)):
        chosen = torch.randperm(len(classes))[: max(ROWS, len(batch))].to(classes.device)
        classes, values = classes[chosen], [each[:, chosen] for each in values]
    return classes, *values


@dataclass(frozen=True)
class DiceLoss:
    """Equation (2).

    Args:
        loss: The loss of the task.
        redundancy: δ.
        bottleneck: β.
        noise: σ.
        seen: Where samples and classes are kept for the step of the critic.
    """

    loss: TaskLoss
    redundancy: float
    bottleneck: float
    noise: float
    seen: list[Tensor] = field(default_factory=list, repr=False)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of each member, (M,)."""
        outputs = batch_outputs(model, batch)
        critic = model.critic if isinstance(model, DICE) and model.training else None
        if critic is None:
            return self.loss.of_outputs(outputs, batch)
        samples = outputs + self.noise * torch.randn_like(outputs)  # (1); fit seeds each step
        losses = self.loss.of_outputs(samples, batch)
        classes, clean, noisy = class_rows(self.loss, batch, outputs, samples)
        if self.bottleneck:
            losses = losses + self.bottleneck / (2 * self.noise**2) * critic.distances(clean, classes)
        if self.redundancy and critic.pairs:
            losses = losses + self._shared(critic, noisy, classes)
        self.seen[:] = [noisy.detach(), classes]
        return losses

    def _shared(self, critic: Critic, samples: Tensor, classes: Tensor) -> Tensor:
        """Return the last term of (2), (M,)."""
        each = critic.redundancy(samples, classes)
        member = each.new_zeros(len(samples))
        for pair, value in zip(critic.pairs, each, strict=True):
            member = member + F.one_hot(torch.tensor(pair), len(samples)).sum(0).to(value) * value
        return self.redundancy / (2 * (len(samples) - 1)) * member
