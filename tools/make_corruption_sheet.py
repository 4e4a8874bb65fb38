"""Draw docs/images/corruptions.png, every corruption at every severity: python tools/make_corruption_sheet.py

Needs CIFAR-10 (``enfold data cifar10 --fetch`` or a folder in ENFOLD_DATA) and the extra 'report' for matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from enfold.data import Split, load
from enfold.data.corruptions import KINDS, SEVERITIES, corrupt
from enfold.errors import MissingExtra

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "corruptions.png"
EXAMPLES = (4, 9)  # a frog and a car of the test part
GAP = 2  # pixels between images


def sheet(images: Tensor, kinds: tuple[str, ...], seed: int) -> Tensor:
    """Return one row per kind; for each image its severities 0 (clean) to 5: (H, W, 3) bytes."""
    rows = []
    for kind in kinds:
        corrupted = torch.stack([images, *(corrupt(images, kind, severity, seed=seed) for severity in SEVERITIES)], 1)
        cells = torch.nn.functional.pad(corrupted, (0, GAP, 0, GAP), value=255)  # (B, 6, 3, H, W)
        blocks = torch.nn.functional.pad(cells.permute(0, 2, 3, 1, 4).flatten(3), (0, 2 * GAP), value=255)
        rows.append(blocks.permute(1, 2, 0, 3).flatten(2))  # (3, H, B·6·W)
    return torch.cat(rows, 1).permute(1, 2, 0)


def draw(images: Tensor, kinds: tuple[str, ...], seed: int, path: Path) -> None:
    """Draw the sheet with the names of the kinds and the numbers of the severities."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("matplotlib", "report", "drawing the sheet") from error
    mosaic = sheet(images, kinds, seed)
    height, width = images.shape[-2:]
    left, top = 1.35, 0.3  # inches for the names and the numbers
    inches = [length / 44 for length in (mosaic.shape[1], mosaic.shape[0])]
    figure = pyplot.figure(figsize=(inches[0] + left, inches[1] + top), dpi=88)  # every pixel becomes 2 x 2
    axes = figure.add_axes(
        (left / (inches[0] + left), 0, inches[0] / (inches[0] + left), inches[1] / (inches[1] + top))
    )
    axes.imshow(mosaic.numpy(), interpolation="nearest", aspect="auto")
    axes.set_yticks([(height + GAP) * (row + 0.5) for row in range(len(kinds))], kinds, fontsize=8)
    block = 6 * (width + GAP) + 2 * GAP
    columns = [block * image + (width + GAP) * (cell + 0.5) for image in range(len(images)) for cell in range(6)]
    axes.set_xticks(columns, ["as it is", *map(str, SEVERITIES)] * len(images), fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """Load two images and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, metavar="KIND")
    parser.add_argument("--examples", nargs="+", type=int, default=list(EXAMPLES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    test = load("cifar10").test
    if not isinstance(test, Split):
        raise SystemExit("the test part must be in memory")
    draw(test.inputs[arguments.examples], tuple(arguments.kinds), arguments.seed, arguments.output)
    print(arguments.output)


if __name__ == "__main__":
    main()
