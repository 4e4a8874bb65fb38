"""Tracing of a forward pass by torch.fx, while other threads call networks."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from enfold.data.tree import map_tensors
from enfold.engines.base import CannotRun
from enfold.engines.call import call_network


def trace_forward(network: nn.Module, inputs: Any = None) -> fx.Graph:
    """Return the graph of the forward pass, which must be equal in train and eval mode and draw no random numbers.

    Args:
        network: The network, which tracing may change.
        inputs: A tensor, or a structure of tensors; the graph has a placeholder for each tensor. None: one for each
            argument of `forward`.

    Raises:
        CannotRun: If there is no such graph.
    """
    graphs: list[fx.Graph] = []
    before = random.getstate(), np.random.get_state()
    try:
        for training in (False, True):
            twin = network.train(training)
            with torch.random.fork_rng(devices=[]):
                before_trace = _random_state()
                graphs.append(_trace(twin, inputs))
                if _random_state() != before_trace:  # a trace would contain the drawn number as a constant
                    raise CannotRun("its forward draws random numbers outside a layer")
            if _is_sequence(network):
                return graphs[0]
    except CannotRun:
        raise
    except Exception as error:  # the user's forward may raise anything
        raise CannotRun(f"its forward cannot be traced ({type(error).__name__}: {error})") from error
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    if str(graphs[0]) != str(graphs[1]):
        raise CannotRun("its forward depends on `training` outside a layer")
    return graphs[0]


def _random_state() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state(legacy=False)["state"]["pos"], bytes(torch.get_rng_state().numpy())


def _is_sequence(network: nn.Module) -> bool:
    """Return whether a network consists of layers of PyTorch in sequences, without code that reads `training`."""
    return type(network) is nn.Sequential and all(
        type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
        for module in network.modules()
    )


_tracing = threading.RLock()


def _trace(network: nn.Module, inputs: Any) -> fx.Graph:
    """Return the graph of the forward pass.

    `fx.Tracer` replaces `nn.Module.__call__` and `nn.Module.__getattr__` during a trace, for all threads. So one thread
    traces at a time (two traces at once would leave the replaced methods behind), and calls of other threads are passed
    on to the original methods.
    """
    with _tracing:
        try:
            return _Tracer((), inputs).trace(network)
        except Exception:  # perhaps of a function of `math`, whose replacement takes a third of the time of a trace
            return _Tracer((math,), inputs).trace(network)


class _Tracer(fx.Tracer):
    """A tracer of the call of a network with inputs of any structure, which records the calls of its own thread only.

    Args:
        autowrap_modules: Modules whose functions may be called with traced values.
        inputs: The inputs, of which tensors are replaced by traced values. None: the arguments of `forward`.
    """

    def __init__(self, autowrap_modules: tuple[ModuleType, ...], inputs: Any) -> None:
        super().__init__(autowrap_modules)  # type: ignore[arg-type]
        self._thread, self._inputs = threading.get_ident(), inputs

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Return the call of the network, in place of its `forward` with one placeholder for each parameter.

        Args:
            root_fn: The forward function.
            is_module: Whether it belongs to a module.
            concrete_args: Arguments that are not traced.
        """
        if self._inputs is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        make: Any = partial(self.create_proxy, "placeholder", "inputs", (), {})
        return call_network, [self.root, map_tensors(lambda _: make(), self._inputs)]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the graph; the network itself is not."""
        return m is not self.root and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replace `nn.Module.__call__`.

        Args:
            m: The module.
            forward: Its forward function.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Replace `nn.Module.__getattr__`.

        Args:
            attr: Name of the attribute.
            attr_val: Its value.
            parameter_proxy_cache: Proxies of parameters that were read before.
        """
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
