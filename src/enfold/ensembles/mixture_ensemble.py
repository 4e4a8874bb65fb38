"""MixtureEnsemble: layers are members' own mixtures of shared templates, whose number follows a parameter budget.

    θ_mj = Σ_{l ∈ t_mj} α_mjl T_l,      |t_mj| = k = min(n, max_templates)                    (1)

P. Teterwak, N. Dryden, D. Bashkirova, K. Saenko, B. A. Plummer: MixtureEnsemble: Leveraging Parameter Sharing for
Efficient Ensembles, 2021, openreview.net/forum?id=u3IYqzOdQdl. Templates: P. Savarese, M. Maire: Learning Implicitly
Recurrent CNNs Through Parameter Sharing, ICLR 2019, arXiv:1902.09701.

Layer j of member m mixes k of the n templates that layers of its type and shape have in common, taken round robin
(`common/template_budget.py`; the mixing is in `common/templates.py`). A shape that occurs once stays one layer of all
members (`thin`: it has a bank too). Where the budget gives most banks no second template, or hardly a shape occurs
twice, one blob holds all (`single_blob`). With k = 1 a layer differs between members by a factor alone, which batch
norm cancels up to its sign: small budgets cost diversity. Biases and whatever else is not mixed are shared.

`counts` says what counts against the budget: "everything", all parameters that are stored, coefficients and members'
batch norms among them; "templates", as published: those two come on top. Then the templates do not depend on M, and M
members are the first M of M + 1, which no fixed total allows. Buffers (batch-norm statistics) never count.

Differs from the paper: what whole templates leave of the budget goes to banks where one more fits, at most one each; a
group whose part is below one template has one, as ordinary layers cost more; the blob is used cyclically, with a
constant factor a layer for the spread it needs, and a layer larger than it is interpolated linearly along its weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from torch import Tensor, nn

from enfold.engines.base import EngineName
from enfold.engines.groups import Decay, decay_groups
from enfold.engines.skeleton import State
from enfold.engines.tree import Tree
from enfold.ensembles.common.sharing import NormChoice, Share, Sharing, batch_norm_names, chosen_layers, require_size
from enfold.ensembles.common.template_budget import Group, Layout, Terms, lay_out
from enfold.ensembles.common.templates import Banks, Blob, kaiming_spread
from enfold.errors import EnfoldError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, nn.Embedding)


@dataclass(frozen=True)
class MixtureEnsemble(Share):
    """Layers mixed from shared templates, as many as a budget of parameters allows."""

    num_members: int = 4
    budget: float | int = 1.0  # with a decimal point in networks, a whole number in parameters; never exceeded
    counts: Literal["everything", "templates"] = "everything"  # against the budget: all parameters, or templates alone
    max_templates: int = 5  # how many templates a layer mixes, at most
    assignment: Literal["shared", "disjoint_greedy"] = "shared"  # the same templates for all members, or others first
    thin: bool = False  # a shape that occurs once has a bank too, instead of one layer for all members
    single_blob: bool | None = None  # one store for all layers, not banks by shape; None: where those are too small
    upsample: bool = True  # whether a layer may be larger than the blob: the last resort of a tiny budget
    batch_norm: NormChoice = "own"
    init: Literal["kaiming", "network"] = "kaiming"  # "network": banks hold its weights, trained or not
    spread: float = 0.1  # "network": the deviation of members' coefficients from the network's
    include: tuple[str, ...] = ()  # patterns of layer names; all layers if empty
    exclude: tuple[str, ...] = ()
    seed: int = 0
    engine: EngineName = "auto"

    def __post_init__(self) -> None:
        require_size(self.num_members)
        if isinstance(self.budget, bool) or not 0 < self.budget < math.inf:
            raise EnfoldError(f"a budget must be above 0, got {self.budget}: 1.0 is one network, 99 is 99 parameters")
        if self.max_templates < 1:
            raise EnfoldError(f"max_templates must be at least 1, got {self.max_templates}: the paper's is 5")
        for field in ("counts", "assignment", "batch_norm", "init"):
            allowed, value = get_args(get_type_hints(type(self))[field]), getattr(self, field)
            if value not in allowed:
                raise EnfoldError(f"{field} must be one of {', '.join(allowed)}, got {value!r}: choose one of them")
        if self.init == "network" and (self.single_blob or self.assignment != "shared"):
            raise EnfoldError(
                "only banks that all members use alike can start from the network, got init: network with "
                f"single_blob={self.single_blob} and assignment={self.assignment!r}: use init: kaiming"
            )

    def __call__(self, network: nn.Module) -> MixtureMembers:
        """M members in the budget."""
        return MixtureMembers(network, self)

    def requested(self, network: nn.Module) -> int:
        """The budget in parameters."""
        if isinstance(self.budget, int):
            return self.budget
        return math.floor(self.budget * sum(parameter.numel() for parameter in network.parameters()) + 1e-6)

    def layout(self, network: nn.Module) -> Layout:
        """What will be stored; a network on the meta device is enough to ask."""
        groups: dict[object, dict[str, int]] = {}
        for name, (kind, weight) in self.mixed(network).items():
            groups.setdefault((kind, weight.shape), {})[name] = weight.numel()
        sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
        own = sum(sizes.get(name, 0) for name in self.own(network))
        others = sum(sizes.values()) - own - sum(sum(group.values()) for group in groups.values())
        terms = Terms(
            budget=self.requested(network),
            fixed=others + (self.num_members * own if self.counts == "everything" else 0),
            network=sum(sizes.values()),
            num_members=self.num_members,
            max_templates=self.max_templates,
            disjoint=self.assignment == "disjoint_greedy",
            count_coefficients=self.counts == "everything",
            thin=self.thin,
            single_blob=False if self.init == "network" else self.single_blob,
            upsample=self.upsample,
        )
        return lay_out([Group(tuple(group), next(iter(group.values()))) for group in groups.values()], terms)

    def own(self, network: nn.Module) -> list[str]:
        """The names of what each member has for itself beside its coefficients."""
        return batch_norm_names(network) if self.batch_norm == "own" else []

    def mixed(self, network: nn.Module) -> dict[str, tuple[type[nn.Module], Tensor]]:
        """Kind and weight of each layer that may be a mixture: none that is frozen, no embedding with special rows."""
        found: dict[str, tuple[type[nn.Module], Tensor]] = {}
        for prefix, layer in chosen_layers(network, LAYERS, self.include, self.exclude).items():
            weight = layer._parameters.get("weight")
            special = getattr(layer, "sparse", False) or any(
                getattr(layer, setting, None) is not None for setting in ("padding_idx", "max_norm")
            )
            if weight is not None and weight.requires_grad and not special:
                kind = next(kind for kind in LAYERS if isinstance(layer, kind))
                found[f"{prefix}.weight" if prefix else "weight"] = (kind, weight)
        kinds = sorted({str(weight.dtype) for _, weight in found.values()})
        if len(kinds) != 1:
            what = " and ".join(kinds) or "none"
            raise EnfoldError(f"templates need trainable weights of one dtype, got {what}: convert or unfreeze some")
        return found


class MixtureMembers(Sharing):
    """The members; `mixture` holds templates and coefficients, `shared` and `own` all that is not mixed."""

    def __init__(self, network: nn.Module, share: MixtureEnsemble) -> None:
        layers, layout = share.mixed(network), share.layout(network)
        super().__init__(network, share.num_members, share.own(network), share.engine, batch_norm=share.batch_norm)
        self.share, self.layout = share, layout
        self.requested = share.requested(network)  # the budget in parameters
        names = [mix.group.names for mix in layout.mixes]
        stored = self.shared.state()
        weights = [[stored.pop(name).detach() for name in group] for group in names]
        self.shared = Tree(stored)
        shapes = [group[0].shape for group in weights]
        spreads = [kaiming_spread(layers[group[0]][0], shape) for group, shape in zip(names, shapes, strict=True)]
        disjoint = share.assignment == "disjoint_greedy"
        kind = Blob if layout.blob else Banks
        self.mixture = kind(layout, shapes, spreads, self.num_members, disjoint=disjoint, seed=share.seed)
        if share.init == "network" and isinstance(self.mixture, Banks):
            self.mixture.start_from(weights, share.spread)
        self.mixture.to(weights[0][0])

    @property
    def counted(self) -> int:
        """Parameters that count against the budget."""
        return self.layout.counted

    @property
    def actual(self) -> int:
        """All parameters that are stored."""
        return sum(parameter.numel() for parameter in self.parameters())

    def expand(self) -> State:
        """Equation (1) for every mixed layer."""
        state = super().expand()
        for mix, weights in zip(self.layout.mixes, self.mixture.weights(), strict=True):
            state.update(zip(mix.group.names, weights.unbind(0), strict=True))  # each (M, *shape)
        return state

    def param_groups(self, weight_decay: float, decay: Decay = "all") -> list[dict[str, Any]]:
        """Templates are decayed and their gradients divided by the members that share them; coefficients are not."""
        groups = super().param_groups(weight_decay, decay)
        for mix, templates in zip(self.layout.mixes, self.mixture.templates, strict=False):  # a blob is of all mixes
            sharers = self.layout.sharers(mix, self.num_members, self.mixture.disjoint)
            groups += decay_groups([(templates, 2)], weight_decay, decay, grad_scale=1 / sharers)
        coefficients = list(self.mixture.coefficients)
        return [*groups, {"params": coefficients, "weight_decay": 0.0, "member_axis": True}]

    def extra_repr(self) -> str:
        """Shown by print(members)."""
        banks = " + ".join(str(mix.templates) for mix in self.layout.mixes)
        held = f"a blob of {self.layout.blob:,}" if self.layout.blob else f"{banks} templates"
        enlarged = sum(len(mix.group.names) for mix in self.layout.mixes if 0 < self.layout.blob < mix.group.size)
        more = f" with {enlarged} layers larger than it" if enlarged else ""
        return f"{super().extra_repr()}, budget {self.requested:,} of which {self.counted:,} are used, {held}{more}"
