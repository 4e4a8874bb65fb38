"""Graph networks: four networks of torch_geometric on batches of graphs, distilled to one.

A batch is an object with the target `y`; the network takes it as it is. If a network takes tensors, pass `unpack=`:

    enfold.fit(ensemble, train, val, unpack=lambda batch: ((batch.x, batch.edge_index, batch.batch), batch.y))
"""

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_mean_pool

import enfold


def make_graphs(number: int, seed: int = 0) -> list[Data]:
    """Draw graphs of 8 to 20 nodes of 4 kinds; the class is whether many edges connect nodes of one kind."""
    rng = torch.Generator().manual_seed(seed)
    graphs = []
    for nodes in torch.randint(8, 21, (number,), generator=rng).tolist():
        kinds = torch.randint(4, (nodes,), generator=rng)
        edges = torch.randint(nodes, (2, 2 * nodes), generator=rng)
        fraction = (kinds[edges[0]] == kinds[edges[1]]).float().mean()
        both_ways = torch.cat([edges, edges.flip(0)], dim=1)
        label = (fraction > 0.27).long()[None]
        graphs.append(Data(x=torch.eye(4)[kinds], edge_index=both_ways, y=label))
    return graphs


class GraphNet(torch.nn.Module):
    """Two GIN layers, the mean over the nodes of each graph, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = GIN(4, 32, num_layers=2)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, batch: Data) -> torch.Tensor:
        """Return the logits of each graph."""
        return self.head(global_mean_pool(self.layers(batch.x, batch.edge_index), batch.batch))


def main() -> None:
    """Train, distil and compare."""
    train = DataLoader(make_graphs(600), batch_size=32, shuffle=True)
    val, test = (
        DataLoader(make_graphs(200, seed=1), batch_size=200),
        DataLoader(make_graphs(500, seed=2), batch_size=250),
    )

    ensemble = enfold.DeepEnsemble(GraphNet, 4)
    enfold.fit(ensemble, train, val, epochs=20, lr=1e-2, quiet=True)
    net = enfold.distill(ensemble, train, val, epochs=10, lr=3e-3, quiet=True)
    control = enfold.train_control(ensemble, train, val, epochs=10, lr=3e-3, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    prediction = ensemble.predict(next(iter(test)))
    certain = prediction.total < prediction.total.median()
    print(f"of {len(certain)} graphs, {int(certain.sum())} have less uncertainty than the median")


if __name__ == "__main__":
    main()
