"""The command that exports a model of a run, a saved model, or a network of the user's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enfold.cli.options import AsJson, Seed, Trust, print_json, say
from enfold.errors import EnfoldError

if TYPE_CHECKING:
    from torch import nn

ROWS = 64  # inputs of a run on which the file is compared


def export(
    source: Annotated[
        str, typer.Argument(help="A run, a .safetensors file that enfold wrote, or file.py:function with --trust-code.")
    ],
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write: .onnx, .pt2 or .safetensors.")],
    label: Annotated[
        str | None, typer.Option(help="Of a run: ensemble, member-0, or the label of a step or control. [ensemble]")
    ] = None,
    outputs: Annotated[str | None, typer.Option(help="raw or prediction; by default raw for a single network.")] = None,
    preprocess: Annotated[
        bool, typer.Option("--preprocess", help="Of a run: include the normalization; inputs are then bytes.")
    ] = False,
    quantize: Annotated[str | None, typer.Option(help="dynamic or static (int8), fp16 or bf16.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Of a saved model: file.py:function that makes its network.")
    ] = None,
    example: Annotated[
        Path | None, typer.Option(help="A .npy, .npz or .safetensors file with inputs; those of a run are known.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="The shape of one input, such as 3,32,32, for random inputs in place of --example."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="classification, binary, multilabel or regression; by default that of the model.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(help="An axis of an input that varies beside that of the examples: --vary input_ids:1=tokens."),
    ] = None,
    opset: Annotated[int, typer.Option(help="The version of the ONNX operators.")] = 20,
    tolerance: Annotated[float, typer.Option(help="The largest accepted difference from the model.")] = 1e-4,
    seed: Seed = None,
    as_json: AsJson = False,
    trust_code: Trust = False,
) -> None:
    """Write a model to one file that predicts without enfold, after comparing it with the model.

    Ensembles return probabilities, entropy and mutual information, or mean, aleatoric and epistemic variance.

    **Examples**

        enfold export runs/demo ensemble.onnx

        enfold export runs/demo small.onnx --label distill --quantize static --preprocess

        enfold export net.safetensors net.pt2 --network nets.py:make --shape 3,32,32 --trust-code
    """
    from enfold.export import export as write

    found = _open(source, label, network, seed, trust_code)
    if preprocess and found.data is None:
        raise EnfoldError("--preprocess needs the data of a run, got a model without data: remove --preprocess")
    normal = found.data if preprocess else None
    given = _read_example(example, shape) if example or shape else found.example(preprocess)
    static = quantize == "static"
    result = write(
        found.model,
        path,
        None if path.suffix == ".safetensors" else given,
        outputs=outputs,  # type: ignore[arg-type]
        task=task or found.task,
        preprocess=normal,
        dynamic_axes=_read_axes(vary),
        opset=opset,
        tolerance=tolerance,
        quantize=quantize,  # type: ignore[arg-type]
        calibrate_on=None if not static else given if found.data is None else found.data,
        test=None if quantize is None else found.data,
    )
    print_json(result.as_dict()) if as_json else say(str(result))


@dataclass(frozen=True)
class _Source:
    """A model, with the data of its run if it has one."""

    model: nn.Module
    example: Callable[[bool], Any]
    data: Any = None
    task: Any = None


def _open(source: str, label: str | None, network: str | None, seed: int | None, trust_code: bool) -> _Source:
    """Return the model that the command names."""
    if Path(source).is_dir():
        if network is not None:
            raise EnfoldError("--network is for saved models, got a run, which has its network: remove --network")
        return _of_run(Path(source), label, seed, trust_code)
    if label is not None or seed is not None:
        raise EnfoldError(f"--label and --seed are for runs, got '{source}', which is not a folder: remove them")
    return _of_code(source, network, trust_code)


def _of_run(path: Path, label: str | None, seed: int | None, trust_code: bool) -> _Source:
    from enfold.cli.preflight import open_trusted
    from enfold.data import Split
    from enfold.run.execute import find_seed

    opened, recipe = open_trusted(path, trust_code)
    chosen = find_seed(opened, recipe, seed)
    data = chosen.data

    def example(raw: bool) -> Any:
        part = data.test
        rows = part[:ROWS].inputs if isinstance(part, Split) else next(iter(part))[0][:ROWS]
        return rows if raw else data.prepare(rows)

    return _Source(_model_of_run(chosen, label or "ensemble"), example, data, "classification")


def _model_of_run(chosen: Any, label: str) -> nn.Module:
    """Return a stored model of a run; nothing is trained."""
    known = {name: kind for kind, name in chosen.list_models() if chosen.is_done(kind, name)}
    members: nn.Module = chosen.members()
    if label == "ensemble":
        return members
    count = chosen.recipe.members
    if label.startswith("member-") and label[7:].isdecimal() and int(label[7:]) < count:
        return chosen.members().member(int(label[7:]))  # type: ignore[no-any-return]
    if label not in known:
        names = ["ensemble", f"member-0 to member-{count - 1}", *known]
        raise EnfoldError(f"--label must be one of the run's models, {', '.join(names)}, got '{label}': change --label")
    spec = chosen.list_models()[known[label], label]
    if known[label] == "controls":
        return chosen.control(label, spec, members)  # type: ignore[no-any-return]
    return chosen.predictor(spec, chosen.step(spec, members))  # type: ignore[no-any-return]


def _of_code(source: str, network: str | None, trust_code: bool) -> _Source:
    import json

    from torch import nn

    from enfold.io.usercode import call, is_reference, looking_in, resolve
    from enfold.saving import load

    with looking_in([Path()], trusted=trust_code):
        if is_reference(source) and not Path(source).is_file():
            made = call(source, resolve(source))
            if not isinstance(made, nn.Module):
                raise EnfoldError(f"'{source}' must return a network, got {type(made).__name__}: return an nn.Module")
            return _Source(made.eval(), _random(None))
        make = None if network is None else resolve(network)
        model = load(source, make)
    about = json.loads(Path(source).with_suffix(".json").read_text(encoding="utf-8")).get("about", {})
    known = "classification" if about.get("num_classes") else None
    return _Source(model, _random(about.get("shape")), task=known if getattr(model, "task", None) is None else None)


def _random(shape: Any) -> Callable[[bool], Any]:
    """Return a function that makes random inputs of a shape; without a shape it returns None."""
    import torch

    def example(raw: bool) -> Any:
        return None if shape is None else torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))

    return example


def _read_axes(given: list[str] | None) -> dict[str, dict[int, str]] | None:
    """Return the axes that vary, by the name of the input."""
    found: dict[str, dict[int, str]] = {}
    for text in given or ():
        place, equals, label = text.partition("=")
        name, colon, axis = place.rpartition(":")
        if not (equals and colon and name and label and axis.isdecimal()):
            raise EnfoldError(f"--vary must be INPUT:AXIS=NAME, got '{text}': write for example input_ids:1=tokens")
        found.setdefault(name, {})[int(axis)] = label
    return found or None


def _read_example(file: Path | None, shape: str | None) -> Any:
    """Return the inputs in a file, a dictionary if there are several; or random inputs of a shape."""
    if file is None:
        try:
            return _random([int(each) for each in str(shape).split(",")])(False)
        except (ValueError, RuntimeError) as error:
            raise EnfoldError(
                f"--shape must be sizes separated by commas, got '{shape}': write for example 3,32,32"
            ) from error
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from enfold.io.files import parsing

    with parsing(file, "a .npy, .npz or .safetensors file of arrays", "save the inputs again"):
        if file.suffix == ".safetensors":
            found = load_file(file)
        else:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return torch.from_numpy(loaded)
            found = {name: torch.from_numpy(loaded[name]) for name in loaded.files}
    return next(iter(found.values())) if len(found) == 1 else found
