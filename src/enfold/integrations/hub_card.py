"""The README.md of a folder: metadata in YAML, which the Hugging Face Hub reads, and a model card in Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from enfold.errors import EnfoldError
from enfold.io.manifest import LIBRARY, VALUES, described_model
from enfold.report.markdown import escape, inline_code
from enfold.report.table import format_markdown

GENERAL = ("pytorch", LIBRARY)


def render_card(
    manifest: Mapping[str, Any],
    name: str,
    *,
    num_parameters: int,
    metrics: Mapping[str, float],
    dataset: str | None,
    pipeline_tag: str | None,
    license: str | None,
    tags: Sequence[str],
    text: str | None,
) -> str:
    """Return the file with its metadata.

    Args:
        manifest: The description of the model.
        name: The name of the model.
        num_parameters: The number of its parameters.
        metrics: Scores on test data.
        dataset: The name of the test data.
        pipeline_tag: The kind of problem, such as "image-classification".
        license: The license, such as "apache-2.0".
        tags: Further tags.
        text: Markdown in place of the description that is made here.
    """
    method = described_model(manifest).get("method")
    kinds = ["ensemble", str(method)] if method else []
    metadata: dict[str, Any] = {
        "library_name": LIBRARY,
        "tags": list(dict.fromkeys([*GENERAL, *kinds, *tags])),
        "license": license,
        "pipeline_tag": pipeline_tag,
        "metrics": list(metrics),
    }
    if metrics and dataset and pipeline_tag:  # the Hub shows results only with all three
        metadata["model-index"] = [_index(name, metrics, dataset, pipeline_tag)]
    written = yaml.safe_dump(
        {key: value for key, value in metadata.items() if value}, sort_keys=False, allow_unicode=True
    )
    body = text if text is not None else _describe(manifest, name, num_parameters, metrics, dataset)
    return f"---\n{written}---\n\n{body.strip()}\n"


def _index(name: str, metrics: Mapping[str, float], dataset: str, pipeline_tag: str) -> dict[str, Any]:
    values = [{"type": metric, "value": value} for metric, value in metrics.items()]
    about = {"name": dataset, "type": dataset}
    return {"name": name, "results": [{"task": {"type": pipeline_tag}, "dataset": about, "metrics": values}]}


def _describe(
    manifest: Mapping[str, Any], name: str, num_parameters: int, metrics: Mapping[str, float], dataset: str | None
) -> str:
    described = described_model(manifest)
    parts = [f"# {escape(name)}", f"{_sentence(manifest, described)} It has {num_parameters:,} parameters."]
    if metrics:
        where = f"on {escape(dataset)}" if dataset else "on test data"
        lines: list[Sequence[str]] = [["metric", "value"], ["---", "---:"]]
        lines += [[escape(metric), f"{value:.4g}"] for metric, value in metrics.items()]
        parts += [f"## Quality {where}", format_markdown(lines)]
    return "\n\n".join([*parts, "## Usage", _usage(manifest, described), "## Made with", _versions(manifest)])


def _sentence(manifest: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    network = inline_code(described["class"])
    if described["kind"] == "ensemble":
        found = f"{inline_code(described['method'])} of {described['num_members']} members of the class {network}"
    else:
        found = f"A network of the class {network}"
    return f"{found}, calibrated on validation data." if manifest["kind"] == "calibrated" else f"{found}."


def _usage(manifest: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    """Return how to load the model; a single network needs no enfold."""
    lines = ["```python", "from enfold.integrations.hub import from_pretrained", ""]
    lines += [f"model = from_pretrained(folder, {_argument(described)})  # a folder, or user/name on the Hub", "```"]
    if manifest["kind"] == "network":
        lines += ["", "Without enfold:", "", "```python", "from safetensors.torch import load_file", ""]
        lines += [f'network.load_state_dict(load_file("{VALUES}"))', "```"]
    elif described["kind"] == "ensemble":
        lines += ["", "`model.predict(x)` has the mean of the members, and the uncertainty of each prediction."]
    return "\n".join([*lines, "", "The folder contains no code: `network` is the class, from the code of the author."])


def _argument(described: Mapping[str, Any]) -> str:
    return "[network, ...]" if described.get("separate") else "network"


def _versions(manifest: Mapping[str, Any]) -> str:
    return escape(", ".join(f"{name} {version}" for name, version in manifest["versions"].items()))


def check_metrics(metrics: Any) -> dict[str, float]:
    """Return the finite scores by name as plain numbers.

    Raises:
        EnfoldError: If one is not a number.
    """
    scores = getattr(metrics, "scores", metrics)
    if not isinstance(scores, Mapping):
        raise EnfoldError(
            f"metrics must be the result of enfold.evaluate or a dictionary, got {type(metrics).__name__}: "
            "pass enfold.evaluate(model, test)"
        )
    found = {}
    for name, value in scores.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EnfoldError(f"metrics must be numbers, got {value!r} for '{name}': leave it out")
        if math.isfinite(value):  # the Hub refuses others
            found[str(name)] = float(value)
    return found
