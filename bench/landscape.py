"""Cost of a 41 x 41 map of the demo's MLP: stacked networks beside a loop over them, and the complete map in seconds.

Writes results/bench-landscape.json. Networks are 784-256-128-10 on fashion-mini. Ratios are of 160 networks on 500 test
examples, including the mixing of their weights; the complete map has 1,681 networks.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from enfold.analysis.states import copy_state, mix_states, predict_in_batches
from enfold.analysis.weight_planes import make_radial_plane, map_plane
from enfold.data import Split, load
from enfold.networks import MLP
from timing import ratios, show, write_record

EXAMPLES = (500, 1000)
SIZE = 41
NETWORKS = 160


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MLP(784, [256, 128], 10)


def main() -> None:
    data, net = load("fashion-mini"), network(0)
    assert isinstance(data.test, Split)
    ends = [copy_state(network(seed)) for seed in (0, 1)]
    weights = torch.rand(NETWORKS, 2)
    inputs = data.prepare(data.test.inputs[: EXAMPLES[0]])

    def loop() -> None:
        with torch.inference_mode():
            for weight in weights:
                net.load_state_dict(mix_states(ends, weight))
                torch.log_softmax(net(inputs), -1)

    def stacked() -> None:
        states = (mix_states(ends, weight) for weight in weights)
        for _ in predict_in_batches(net, states, data, examples=EXAMPLES[0]):
            pass

    table = ratios({"Python loop": loop, "predict_in_batches": stacked})
    show(f"{NETWORKS} networks, {EXAMPLES[0]} examples", table)
    seconds = {}
    for examples in EXAMPLES:
        started = time.perf_counter()
        map_plane(net, make_radial_plane(net, *ends), data, size=SIZE, examples=examples, quiet=True)
        seconds[f"{examples} examples"] = round(time.perf_counter() - started, 2)
    print(f"{SIZE} x {SIZE} map, seconds: {seconds}")
    write_record("landscape", {f"{NETWORKS} networks": table}, map_seconds=seconds)


if __name__ == "__main__":
    main()
