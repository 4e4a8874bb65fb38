"""MixtureEnsemble: layers are mixtures of common templates, whose number follows from a parameter budget.

    θ_mj = Σ_{l ∈ t_mj} α_mjl T_l,      |t_mj| = k = min(n, max_templates)                    (1)

P. Teterwak, N. Dryden, D. Bashkirova, K. Saenko, B. A. Plummer: MixtureEnsemble: Leveraging Parameter Sharing for
Efficient Ensembles, 2021, openreview.net/forum?id=u3IYqzOdQdl. Templates: P. Savarese, M. Maire: Learning Implicitly
Recurrent CNNs Through Parameter Sharing, ICLR 2019, arXiv:1902.09701.

Layer j of member m mixes k of the n templates (a bank) of the layers of its type and shape, assigned round robin
(`common/template_budget.py`; the mixing is in `common/templates.py`). A shape that occurs once is one layer for all
members (with `thin`, it has a bank, too). Where the budget gives most banks no second template, or few shapes occur
twice, one blob stores all parameters (`single_blob`). With k = 1 a layer only differs between members by a factor,
which batch norm cancels up to its sign: small budgets cost diversity. Biases and what is not mixed are common to all
members.

`counts` decides what counts against the budget: "everything", all stored parameters, also coefficients and members'
batch norms; "templates", as published: those two are not counted. Then the templates do not depend on M, and M members
are the first M of M + 1, which no fixed total allows. Buffers (batch-norm statistics) never count.

As published, a step passes one batch through all members; with batches="own" each member has its own order of the data,
so that templates are trained on M times as many different examples in a step.

Differs from the paper: the remainder of the budget goes to banks that have space for one more template, at most one
each; a group that could not store one template has one, as ordinary layers cost more; the blob is used cyclically, with
a constant factor per layer for its initial scale, and a larger layer is interpolated linearly along its weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import PositiveInt
from torch import Tensor, nn

from enfold.arguments import checked
from enfold.engines.base import EngineName
from enfold.engines.parameters import Decay, Tree, decay_groups
from enfold.engines.skeleton import State
from enfold.ensembles.common.efficient import EfficientEnsemble, NormChoice, batch_norm_names, select_layers
from enfold.ensembles.common.options import NonNegative, Positive
from enfold.ensembles.common.template_budget import Group, Layout, Terms, make_layout
from enfold.ensembles.common.templates import Banks, Blob, kaiming_spread
from enfold.errors import EnfoldError
from enfold.train import TrainConfig

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, nn.Embedding)


@checked
class MixtureEnsemble(EfficientEnsemble):
    """Layers that are mixtures of common templates, as many as a budget of parameters allows.

    Args:
        network: The network. It is not modified.
        num_members: The number of members.
        budget: The size of the ensemble, never exceeded: a float in multiples of the network, an int in parameters.
        counts: What counts against the budget: "everything", or only "templates", as published.
        max_templates: The largest number of templates that a layer mixes; 5 is published.
        assignment: "shared": members use the same templates; "disjoint_greedy": different ones where possible.
        thin: Whether a shape that occurs once has a bank, instead of one layer for all members.
        single_blob: Whether one blob stores all layers, not banks by shape; None: only where banks are too small.
        upsample: Whether a layer may be larger than the blob, for very small budgets.
        batch_norm: shared (statistics are each member's own), own (EnsembleBN) or joint (one for all members).
        init: The initial templates: "kaiming", or "network", where banks start from its weights, trained or not.
        spread: The standard deviation of the members' coefficients, for init="network".
        batches: "shared": all members are trained on the same batch, as published; "own": each on its own, as always
            with `bootstrap` or `folds`.
        include: Regular expressions for the names of the layers to mix; all layers if empty.
        exclude: Regular expressions for the names of layers not to mix.
        seed: The seed of templates and coefficients.
        engine: How members are run: auto, measure, stacked, loop or vmap.
    """

    def __init__(
        self,
        network: nn.Module,
        num_members: PositiveInt = 4,
        *,
        budget: PositiveInt | Positive = 1.0,
        counts: Literal["everything", "templates"] = "everything",
        max_templates: PositiveInt = 5,
        assignment: Literal["shared", "disjoint_greedy"] = "shared",
        thin: bool = False,
        single_blob: bool | None = None,
        upsample: bool = True,
        batch_norm: NormChoice = "own",
        init: Literal["kaiming", "network"] = "kaiming",
        spread: NonNegative = 0.1,
        batches: Literal["shared", "own"] = "shared",
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        seed: int = 0,
        engine: EngineName = "auto",
    ) -> None:
        if init == "network" and (single_blob or assignment != "shared"):
            raise EnfoldError(
                "init must be 'kaiming' unless all members use the same banks, got init='network' with "
                f"single_blob={single_blob} and assignment={assignment!r}: change init"
            )
        layers = mixable_layers(network, include, exclude)
        own = batch_norm_names(network) if batch_norm == "own" else []
        layout = template_layout(
            network,
            num_members,
            budget=budget,
            counts=counts,
            max_templates=max_templates,
            assignment=assignment,
            thin=thin,
            single_blob=False if init == "network" else single_blob,
            upsample=upsample,
            own=own,
            layers=layers,
        )
        super().__init__(network, num_members, own, engine, batch_norm=batch_norm)
        self.budget, self.counts, self.max_templates = budget, counts, max_templates
        self.assignment, self.thin, self.single_blob, self.upsample = assignment, thin, single_blob, upsample
        self.batch_norm, self.init, self.spread, self.batches = batch_norm, init, spread, batches
        self.include, self.exclude, self.seed = include, exclude, seed
        self.layout, self.requested = layout, requested_parameters(network, budget)
        names = [mix.group.names for mix in layout.mixes]
        stored = self.shared.state()
        weights = [[stored.pop(name).detach() for name in group] for group in names]
        self.shared = Tree(stored)
        shapes = [group[0].shape for group in weights]
        spreads = [kaiming_spread(layers[group[0]][0], shape) for group, shape in zip(names, shapes, strict=True)]
        kind = Blob if layout.blob else Banks
        self.mixture = kind(layout, shapes, spreads, num_members, disjoint=assignment == "disjoint_greedy", seed=seed)
        if init == "network" and isinstance(self.mixture, Banks):
            self.mixture.start_from(weights, spread)
        self.mixture.to(weights[0][0])

    def configure(self, config: TrainConfig) -> TrainConfig:
        """Train all members on the same batches, unless each is to have its own."""
        is_own = self.batches == "own" or config.bootstrap or config.folds is not None
        return config if is_own or config.order != "own" else config.replace(order="shared")

    @property
    def counted(self) -> int:
        """The number of parameters that count against the budget."""
        return self.layout.counted

    @property
    def actual(self) -> int:
        """The number of all stored parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def expand(self) -> State:
        """Return the members' parameters: (1) for mixed layers."""
        state = super().expand()
        for mix, weights in zip(self.layout.mixes, self.mixture.weights(), strict=True):
            state.update(zip(mix.group.names, weights.unbind(0), strict=True))  # each (M, *shape)
        return state

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Return the groups; templates are decayed, their gradients divided by the number of members that use them."""
        groups = super().param_groups(weight_decay, decay)
        for mix, templates in zip(self.layout.mixes, self.mixture.templates, strict=False):  # a blob is of all mixes
            users = self.layout.members_per_template(mix, self.num_members, self.mixture.disjoint)
            groups += decay_groups([(templates, 2)], weight_decay, decay, grad_scale=1 / users)
        coefficients = list(self.mixture.coefficients)
        return [*groups, {"params": coefficients, "weight_decay": 0.0, "member_axis": True}]

    def extra_repr(self) -> str:
        """Return the summary that print(ensemble) shows, with the budget."""
        banks = " + ".join(str(mix.templates) for mix in self.layout.mixes)
        held = f"a blob of {self.layout.blob:,}" if self.layout.blob else f"{banks} templates"
        enlarged = sum(len(mix.group.names) for mix in self.layout.mixes if 0 < self.layout.blob < mix.group.size)
        more = f" with {enlarged} layers larger than it" if enlarged else ""
        return f"{super().extra_repr()}, budget {self.requested:,} of which {self.counted:,} are used, {held}{more}"


Layers = dict[str, tuple[type[nn.Module], Tensor]]  # kind and weight by the name of the weight


def mixable_layers(network: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> Layers:
    """Return the layers that may be mixtures: no frozen weights, no embeddings with special rows."""
    layers: Layers = {}
    for prefix, layer in select_layers(network, LAYERS, include, exclude).items():
        weight = layer._parameters.get("weight")
        is_special = getattr(layer, "sparse", False) or any(
            getattr(layer, setting, None) is not None for setting in ("padding_idx", "max_norm")
        )
        if weight is not None and weight.requires_grad and not is_special:
            kind = next(kind for kind in LAYERS if isinstance(layer, kind))
            layers[f"{prefix}.weight" if prefix else "weight"] = (kind, weight)
    dtypes = sorted({str(weight.dtype) for _, weight in layers.values()})
    if len(dtypes) != 1:
        what = " and ".join(dtypes) or "none"
        raise EnfoldError(f"network must have trainable weights of one dtype, got {what}: convert or unfreeze some")
    return layers


def template_layout(
    network: nn.Module,
    num_members: int = 4,
    *,
    budget: float = 1.0,
    counts: str = "everything",
    max_templates: int = 5,
    assignment: str = "shared",
    thin: bool = False,
    single_blob: bool | None = None,
    upsample: bool = True,
    own: Sequence[str] | None = None,
    layers: Layers | None = None,
) -> Layout:
    """Return what a `MixtureEnsemble` with these options would store; the network may be on the meta device.

    Args:
        network: The network.
        num_members: The number of members.
        budget: See `MixtureEnsemble`, also for the other options.
        counts: See there.
        max_templates: See there.
        assignment: See there.
        thin: See there.
        single_blob: See there.
        upsample: See there.
        own: The names of what members own; by default batch norms.
        layers: The layers that are mixed; by default all of a supported kind.
    """
    own = batch_norm_names(network) if own is None else own
    layers = mixable_layers(network, (), ()) if layers is None else layers
    terms = Terms(
        budget=requested_parameters(network, budget),
        fixed=_fixed_parameters(network, own, layers, num_members if counts == "everything" else 0),
        network=sum(parameter.numel() for parameter in network.parameters()),
        num_members=num_members,
        max_templates=max_templates,
        disjoint=assignment == "disjoint_greedy",
        count_coefficients=counts == "everything",
        thin=thin,
        single_blob=single_blob,
        upsample=upsample,
    )
    return make_layout(_groups(layers), terms)


def requested_parameters(network: nn.Module, budget: float) -> int:
    """Return the budget in parameters."""
    if isinstance(budget, int):
        return budget
    return math.floor(budget * sum(parameter.numel() for parameter in network.parameters()) + 1e-6)


def _groups(layers: Layers) -> list[Group]:
    """Return the layers of the same kind and shape as groups."""
    groups: dict[object, dict[str, int]] = {}
    for name, (kind, weight) in layers.items():
        groups.setdefault((kind, weight.shape), {})[name] = weight.numel()
    return [Group(tuple(group), next(iter(group.values()))) for group in groups.values()]


def _fixed_parameters(network: nn.Module, own: Sequence[str], layers: Layers, copies: int) -> int:
    """Return the number of parameters that are not mixed; those that members own count `copies` times."""
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    owned = sum(sizes.get(name, 0) for name in own)
    mixed = sum(weight.numel() for _, weight in layers.values())
    return sum(sizes.values()) - owned - mixed + copies * owned
