"""Short tables for the guides: the rows of a record between which a reader chooses."""

from __future__ import annotations

from studies.markdown import Content, format_spread, make_table
from studies.rows import TITLES

ROWS: dict[str, dict[str, str]] = {
    "cifar10-distillation": {
        "mean member": "one member",
        "ensemble": "ensemble of 4",
        "control": "control: best member, trained further",
        "kd": "KD from scratch",
        "ae-kd": "AE-KD from scratch",
        "latent-be": "LatentBE",
        "batch-ensemble": "BatchEnsemble, from scratch",
        "be-mean": "BatchEnsemble, distilled",
    },
    "cifar10-ensembles": {
        "mean member": "one member",
        "ensemble": "deep ensemble of 4",
        "mixture-3.3": TITLES["mixture-3.3"],
        "tree-net": TITLES["tree-net"],
        "mixture-1.0": TITLES["mixture-1.0"],
        "batch-ensemble": TITLES["batch-ensemble"],
        "mc-dropout": TITLES["mc-dropout"],
        "swag": TITLES["swag"],
        "mimo": TITLES["mimo"],
    },
    "finetuned-merges": {
        "mean member": "mean member",
        "best member": "best member on validation data",
        "ensemble": "ensemble of 4",
        "average": "average",
        "soup, greedy (NLL)": "greedy soup",
        "soup, learned": "learned soup",
        "Model Stock": "Model Stock",
        "TIES, density 0.2": "TIES, density 0.2",
    },
}
"""Labels and titles of the rows of each record, in order."""


def choices_table(content: Content) -> str:
    """Return accuracy and NLL of the rows, with cost where the record has it and calibrated NLL elsewhere."""
    if "tables" in content:
        return _finetuned(content)
    rows = content["rows"]
    one = rows["mean member"]["cost"]
    lines = [["", "accuracy (%)", "NLL", "gain recovered (%)", "operations", "parameters"]]
    for label, title in ROWS[content["name"]].items():
        row, scores = rows[label], rows[label]["scores"]
        gain = "-" if label in ("mean member", "ensemble") else format_spread(row["gain_recovered"], 100, 0)
        ratios = [f"{row['cost'][key] / one[key]:.1f}x" for key in ("flops", "parameters")]
        quality = [format_spread(scores["accuracy"], 100, 2), format_spread(scores["nll"], 1, 3)]
        lines.append([title, *quality, gain, *ratios])
    return make_table(lines)


def _finetuned(content: Content) -> str:
    (rows,) = content["tables"].values()
    lines = [["", "accuracy (%)", "NLL", "calibrated NLL"]]
    for label, title in ROWS["finetuned-merges"].items():
        scores = [format_spread(rows[label][key], 1, 3) for key in ("nll", "cnll")]
        lines.append([title, format_spread(rows[label]["accuracy"], 100, 2), *scores])
    return make_table(lines)
