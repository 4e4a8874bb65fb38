"""Hugging Face Hub: models as folders with config.json, model.safetensors and a model card.

    save_pretrained(net, "my-net", metrics=enfold.evaluate(net, test))    # needs no network and no further package
    net = from_pretrained("my-net", make_net)                             # or enfold.load("my-net", make_net)
    push_to_hub(net, "me/my-net")                                         # needs huggingface_hub
    net = from_pretrained("me/my-net", make_net)

The tensors of a single network have the names of its state dict, so that the folder can be loaded without enfold. Code
is never taken from a folder: the class of the network comes from the caller.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from enfold.engines.call import require_network
from enfold.ensemble import Ensemble
from enfold.errors import EnfoldError, MissingExtra
from enfold.evaluate import Row
from enfold.integrations.hub_card import check_metrics, render_card
from enfold.io.files import atomic_path, writing
from enfold.io.manifest import CARD, CONFIG, LARGEST, LIBRARY, VALUES, read_json
from enfold.saving import describe, load, versions, write_model


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    about: Mapping[str, Any] | None = None,
    name: str | None = None,
    metrics: Row | Mapping[str, float] | None = None,
    dataset: str | None = None,
    pipeline_tag: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    card: str | None = None,
) -> Path:
    """Save a network, an ensemble or a calibrated model to a folder, with a model card.

    Args:
        model: The model. A single network is stored under the names of its state dict.
        folder: The folder, which is made if it is missing. Other files in it are left alone, and an existing README.md
            is kept unless `card` is given.
        about: Plain values that are stored in config.json. With `network` (the spec of a network of `enfold.networks`),
            `shape` and `num_classes`, the model is loaded without its network.
        name: The name of the model in the card; None for the name of the folder.
        metrics: Scores on test data for the card, such as the result of `enfold.evaluate`.
        dataset: The name of these test data.
        pipeline_tag: The kind of problem in the terms of the Hub, such as "image-classification".
        license: The license of the model, such as "apache-2.0".
        tags: Further tags.
        card: The text of the card in Markdown, in place of the one that is made here.

    Returns:
        The folder.

    Raises:
        EnfoldError: If the folder has a model of another library, or an argument is not valid.
        WriteError: If a file cannot be written.
    """
    require_network(model)
    folder = Path(folder)
    _require_free(folder)
    scores = {} if metrics is None else check_metrics(metrics)
    readme = folder / CARD
    if readme.exists() and card is None:
        write_model(model, folder / VALUES, folder / CONFIG, about)
        return folder
    text = render_card(
        {**describe(model), "versions": versions()},
        name or folder.resolve().name,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        metrics=scores,
        dataset=dataset,
        pipeline_tag=pipeline_tag,
        license=license,
        tags=tags,
        text=card,
    )
    with atomic_path(readme) as written:
        written.write_text(text, encoding="utf-8")
        write_model(model, folder / VALUES, folder / CONFIG, about)
    return folder


def _require_free(folder: Path) -> None:
    """Refuse a path that is a file, or a folder with a model of another library, which would be replaced."""
    if folder.exists() and not folder.is_dir():
        raise EnfoldError(f"folder must be a folder, got the file '{folder}': choose another name")
    config = folder / CONFIG
    if config.is_file():
        with writing(config):
            library = read_json(config, LARGEST).get("library_name")
        if library != LIBRARY:
            raise EnfoldError(
                f"folder must be empty or have a model of enfold, but '{config}' is of another library: choose another "
                "folder"
            )
    elif (folder / VALUES).exists():
        raise EnfoldError(
            f"folder must be empty or have a model of enfold, got '{folder / VALUES}' without {CONFIG}: choose another "
            "folder"
        )


def from_pretrained(
    source: str | Path,
    network: nn.Module | Callable[[], nn.Module] | Sequence[nn.Module] | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
) -> nn.Module:
    """Load a model from a folder that `save_pretrained` wrote, or from the Hugging Face Hub.

    Of a repository, only config.json and model.safetensors are downloaded.

    Args:
        source: A folder, or the name of a repository such as "user/name".
        network: A network of the class that was saved, or a function that makes one; a list of networks for an
            ensemble whose members differ in more than parameters; None for the networks of `enfold.networks`.
        revision: The branch, tag or commit on the Hub.
        token: The access token of the Hub; None for the stored one.
        cache_dir: The folder for downloads; None for that of huggingface_hub.

    Returns:
        The model in eval mode.

    Raises:
        EnfoldError: If the model cannot be downloaded, is damaged, of another library or class, or the folder has files
            that may contain code.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(str(source), revision, token, cache_dir)
    return load(folder, network)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    **settings: Any,
) -> str:
    """Upload a model to the Hugging Face Hub; the repository is made if it is missing.

    Args:
        model: The model.
        repo_id: The name of the repository, such as "user/name".
        private: Whether a new repository is private; None for the default of the account.
        revision: The branch.
        token: The access token of the Hub; None for the stored one.
        commit_message: The message of the commit.
        **settings: Further arguments of `save_pretrained`. A README.md that is on the Hub is kept unless `card` is
            given.

    Returns:
        The address of the commit.

    Raises:
        EnfoldError: If the upload fails; nothing is changed then.
    """
    hub = _import_hub()
    with tempfile.TemporaryDirectory() as temporary:
        name = repo_id.rpartition("/")[2]
        folder = save_pretrained(model, Path(temporary) / "model", **{"name": name, **settings})
        with _calling(f"'{repo_id}' must be uploaded to the Hugging Face Hub"):
            api = hub.HfApi(token=token, library_name=LIBRARY)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            kept = settings.get("card") is None and api.file_exists(repo_id, CARD, revision=revision)
            kind = type(model).__name__ if isinstance(model, Ensemble) else "model"
            done = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=[CONFIG, VALUES] if kept else [CONFIG, VALUES, CARD],
                revision=revision,
                commit_message=commit_message or f"Upload {kind} with enfold",
            )
    return str(done.commit_url)


def _download(source: str, revision: str | None, token: str | bool | None, cache_dir: str | Path | None) -> Path:
    """Return the folder with the two files of a repository, of one commit."""
    if source.count("/") != 1 or source.startswith((".", "/", "~")) or ".." in source:
        raise EnfoldError(
            f"source must be an existing folder or the name of a repository such as 'user/name', got '{source}': "
            "check the path"
        )
    hub = _import_hub()
    options = {"token": token, "cache_dir": cache_dir, "library_name": LIBRARY}
    with _calling(f"source '{source}' is not a local folder and must be downloaded from the Hugging Face Hub"):
        config = Path(hub.hf_hub_download(source, CONFIG, revision=revision, **options))
        hub.hf_hub_download(source, VALUES, revision=config.parent.name, **options)  # the commit
    return config.parent


def _import_hub() -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("huggingface_hub", "hub", "enfold.integrations.hub") from error
    return huggingface_hub


@contextmanager
def _calling(what: str) -> Iterator[None]:
    """Convert errors of the Hub inside the block, from timeouts to missing rights."""
    try:
        yield
    except EnfoldError:
        raise
    except Exception as error:  # of several packages
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise EnfoldError(f"{what}, but that fails ({reason}): check the name, the token and the connection") from error
