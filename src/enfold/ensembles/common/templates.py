"""Templates: tensors that the layers of all members mix, stored in a bank per shape or in one blob.

    θ_mj = Σ_{l ∈ t_mj} α_mjl T_l                                                             (1)
    W_m = A_m T     for all layers of a group: (L x n) (n x size), A_m contains α_m           (2)
    T_l = c_j · the next piece of the blob, which has the layer's size                        (3)

Rows of α are initialised with norm 1, so that a mixture has the variance of its templates, and are orthogonal where
possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enfold.ensembles.common.template_budget import Layout, Mix, round_robin
from enfold.errors import EnfoldError
from enfold.seeds import generator

INTERPOLATED = math.sqrt(2 / 3)  # approximate ratio of standard deviations, after and before linear interpolation


class Mixture(nn.Module):
    """The parameters of a layout: `templates`, and for each group the `coefficients` α, (M, L, k)."""

    def __init__(self, layout: Layout, num_members: int, disjoint: bool, seed: int) -> None:
        super().__init__()
        self.layout, self.num_members, self.disjoint, self.seed = layout, num_members, disjoint, seed
        drawn = [torch.stack([self._rows(mix, member) for member in range(num_members)]) for mix in layout.mixes]
        self.coefficients = nn.ParameterList(drawn)
        self.templates = nn.ParameterList()

    def _rows(self, mix: Mix, member: int) -> Tensor:
        source = generator(self.seed, "mixture", "coefficients", mix.group.names[0], member)
        return orthogonal_rows(len(mix.group.names), mix.per_layer, source)

    def weights(self) -> list[Tensor]:
        """Return the weights of each group, (L, M, *shape)."""
        raise NotImplementedError


class Banks(Mixture):
    """One bank per group, (n, *shape), drawn from a normal distribution; `spreads` are the standard deviations."""

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[torch.Size],
        spreads: Sequence[float],
        num_members: int,
        *,
        disjoint: bool,
        seed: int,
    ) -> None:
        super().__init__(layout, num_members, disjoint, seed)
        for number, (mix, shape, spread) in enumerate(zip(layout.mixes, shapes, spreads, strict=True)):
            sources = [
                generator(seed, "mixture", "template", mix.group.names[0], each) for each in range(mix.templates)
            ]
            self.templates.append(torch.stack([spread * torch.randn(shape, generator=source) for source in sources]))
            index = torch.tensor(round_robin(mix, num_members, disjoint))  # (M, L, k)
            self.register_buffer(f"index{number}", index, persistent=False)

    def weights(self) -> list[Tensor]:
        """Return (2), one product per group; templates that a layer does not mix have the coefficient 0 in A."""
        found = []
        for number, (alpha, templates) in enumerate(zip(self.coefficients, self.templates, strict=True)):
            zeros = alpha.new_zeros(*alpha.shape[:2], len(templates))
            matrix = zeros.scatter(2, self.get_buffer(f"index{number}"), alpha)  # (M, L, n)
            product = matrix.transpose(0, 1) @ templates.flatten(1)  # (2): (L, M, n) (n, size)
            found.append(product.view(*product.shape[:2], *templates.shape[1:]))
        return found

    @torch.no_grad()
    def start_from(self, weights: Sequence[Sequence[Tensor]], spread: float) -> None:
        """Set one template of every layer to its weight in the network, (L, *shape) for each group.

        Its coefficient is 1 and the others are 0, plus Gaussian noise of standard deviation `spread` for each member.
        """
        from scipy.optimize import linear_sum_assignment

        for mix in self.layout.mixes:
            if mix.templates < len(mix.group.names):
                raise EnfoldError(
                    "budget must allow a template for each layer if init='network', got one for "
                    f"{mix.templates} templates of the {len(mix.group.names)} layers like '{mix.group.names[0]}': "
                    "raise budget, or set init='kaiming'"
                )
        for number, (mix, own) in enumerate(zip(self.layout.mixes, weights, strict=True)):
            index = self.get_buffer(f"index{number}")[0]  # (L, k)
            unused = torch.ones(len(index), mix.templates).scatter(1, index, 0.0)
            # A matching exists: each layer mixes k templates, and none is mixed by more than k of at most n layers.
            _, place = linear_sum_assignment(unused.numpy())
            chosen = torch.from_numpy(place)  # (L,)
            self.templates[number][chosen] = torch.stack([weight.to(self.templates[number]) for weight in own])
            start = (index == chosen[:, None]).float()  # (L, k)
            for member in range(self.num_members):
                source = generator(self.seed, "mixture", "spread", mix.group.names[0], member)
                noise = torch.randn(start.shape, generator=source)
                self.coefficients[number][member] = start + spread * noise


class Blob(Mixture):
    """One vector for all layers, which use consecutive pieces of it, cyclically.

    Its standard deviation is the geometric mean of those of the layers; a constant c_j corrects it for each layer.
    """

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[torch.Size],
        spreads: Sequence[float],
        num_members: int,
        *,
        disjoint: bool,
        seed: int,
    ) -> None:
        super().__init__(layout, num_members, disjoint, seed)
        self.shapes = list(shapes)
        totals = [mix.group.total for mix in layout.mixes]
        mean = math.exp(sum(t * math.log(s) for t, s in zip(totals, spreads, strict=True)) / sum(totals))
        self.factors = [
            spread / mean / (INTERPOLATED if mix.group.size > layout.blob else 1.0)
            for mix, spread in zip(layout.mixes, spreads, strict=True)
        ]
        self.templates.append(mean * torch.randn(layout.blob, generator=generator(seed, "mixture", "blob")))

    def weights(self) -> list[Tensor]:
        """Return (3) and (1)."""
        found = []
        users = self.num_members if self.disjoint else 1
        pieces = self._pieces(users)
        mixes = self.layout.mixes
        for number, (mix, shape, factor) in enumerate(zip(mixes, self.shapes, self.factors, strict=True)):
            stacked = torch.stack(pieces[number :: len(mixes)])  # (M or 1, L * k * piece)
            templates = stacked.view(-1, mix.per_layer, self.layout.piece(mix))
            if mix.group.size > self.layout.blob:
                templates = F.interpolate(templates, size=mix.group.size, mode="linear")
            templates = templates.view(users, len(mix.group.names), mix.per_layer, mix.group.size)
            alpha = self.coefficients[number] * factor  # (M, L, k)
            if self.disjoint:
                product = torch.einsum("mlk,mlks->lms", alpha, templates)  # (1)
            else:
                product = torch.einsum("mlk,lks->lms", alpha, templates[0])
            found.append(product.view(*product.shape[:2], *shape))
        return found

    def _pieces(self, users: int) -> tuple[Tensor, ...]:
        """Return the repeated blob, split into one piece for each user and group."""
        sizes = [len(mix.group.names) * mix.per_layer * self.layout.piece(mix) for mix in self.layout.mixes] * users
        rounds = math.ceil(sum(sizes) / self.layout.blob)
        endless = self.templates[0].expand(rounds, self.layout.blob).reshape(-1)
        return torch.split(endless[: sum(sizes)], sizes)


def orthogonal_rows(rows: int, columns: int, source: torch.Generator) -> Tensor:
    """Return random rows of norm 1; within each block of `columns` rows they are orthogonal."""
    blocks = []
    for _ in range(math.ceil(rows / columns)):
        q, r = torch.linalg.qr(torch.randn(columns, columns, generator=source, dtype=torch.float64))
        blocks.append(q * r.diagonal().sign())  # uniform over all rotations and reflections
    return torch.cat(blocks)[:rows].float()


def kaiming_spread(kind: type[nn.Module], shape: torch.Size) -> float:
    """Return the standard deviation of the initial weights: sqrt(2 / fan in), and 1 for an embedding."""
    return 1.0 if issubclass(kind, nn.Embedding) else math.sqrt(2 / math.prod(shape[1:]))
