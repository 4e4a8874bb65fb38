"""Folders of accelerate, FSDP and torch.distributed.checkpoint, and hostile ones."""

import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from checkpoint_files import assert_loaded, draw, make, read
from enfold import EnfoldError

pytestmark = pytest.mark.filterwarnings("ignore")


def test_folders_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    network = make()
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model", max_shard_size="1KB")
    assert_loaded(read(tmp_path / "state"), [network])
    assert_loaded(read(tmp_path / "model"), [network])
    torch.save(network.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    assert_loaded(read(tmp_path), [network])


def save_distributed(content, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=folder, no_dist=True)


def test_folders_of_distributed_checkpoint(tmp_path):
    networks = draw(3)
    optimizer = torch.optim.AdamW(networks[0].parameters())
    networks[0](torch.randn(4, 4)).sum().backward()
    optimizer.step()
    save_distributed(
        {"model": networks[0].state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "a"
    )
    save_distributed(networks[1].state_dict(), tmp_path / "b")
    save_distributed({"model": networks[2].state_dict()}, tmp_path / "c" / "pytorch_model_fsdp_0")
    assert_loaded(read(tmp_path), networks)
    scaled = {"student": networks[0].state_dict(), "teacher": networks[1].state_dict()}
    save_distributed(scaled, tmp_path / "d")
    assert_loaded(read(tmp_path / "d", key="teacher"), networks[1:2])
    with pytest.raises(EnfoldError, match="key='student'"):
        read(tmp_path / "d")


def test_pieces_of_several_processes_are_put_together(tmp_path):
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    network = nn.Linear(300, 200, dtype=torch.bfloat16)
    torch.save({"model": network.state_dict()}, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "d")
    split_in_two(tmp_path / "d")
    assert_loaded(read(tmp_path / "d", lambda: nn.Linear(300, 200, dtype=torch.bfloat16)), [network])


def split_in_two(folder, name="model.weight"):
    """Rewrite a folder as two processes write it: each has half of the rows."""
    import io
    from dataclasses import replace

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - written above
    whole = next(key for key in metadata.storage_data if key.fqn == name)
    place = metadata.storage_data.pop(whole)
    content = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
    tensor = torch.load(io.BytesIO(content), weights_only=True)
    about, half, chunks = metadata.state_dict_metadata[name], len(tensor) // 2, []
    for rank, part in enumerate((tensor[:half], tensor[half:])):
        written = io.BytesIO()
        torch.save(part.clone(), written)
        file = f"__{rank + 1}_0.distcp"
        (folder / file).write_bytes(b"padding" * rank + written.getvalue())
        offset = torch.Size((rank * half, 0))
        chunks.append(ChunkStorageMetadata(offset, part.shape))
        place = replace(place, relative_path=file, offset=7 * rank, length=len(written.getvalue()))
        metadata.storage_data[MetadataIndex(name, offset)] = place
    metadata.state_dict_metadata[name] = replace(about, chunks=chunks)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def change_index(folder, change):
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # noqa: S301 - written above
    change(metadata)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def places_of(metadata):
    return [place for key, place in metadata.storage_data.items() if key.fqn == "model.0.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(places_of(m)[0], "relative_path", "../secret"), r"\.\./secret"),
        (lambda m: setattr(places_of(m)[0], "relative_path", "/etc/passwd"), "/etc/passwd"),
        (lambda m: setattr(places_of(m)[0], "relative_path", "__9_0.distcp"), "__9_0.distcp' is missing"),
        (lambda m: setattr(places_of(m)[0], "length", 1 << 40), "shorter"),
        (lambda m: setattr(places_of(m)[0], "offset", -1), "shorter"),
        (lambda m: setattr(places_of(m)[0], "transform_descriptors", ["zstd"]), "compressed"),
        (lambda m: setattr(m.state_dict_metadata["model.0.weight"], "size", torch.Size((1 << 20, 1 << 20))), "bytes"),
        (lambda m: setattr(m.state_dict_metadata["model.0.weight"], "chunks", []), "has 0 bytes"),
        (lambda m: m.state_dict_metadata["model.0.weight"].chunks[0].__dict__.update(sizes=(2, 4)), "shape"),
        (lambda m: m.storage_data.clear(), "missing"),
        (lambda m: setattr(m, "planner_data", {"model.0.weight": ("model", print)}), "builtins.print"),
    ],
)
def test_hostile_folders_of_distributed_checkpoint(change, message, tmp_path):
    save_distributed({"model": draw(1)[0].state_dict()}, tmp_path)
    change_index(tmp_path, change)
    with pytest.raises(EnfoldError, match=message):
        read(tmp_path)


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (type(self.path).touch, (self.path,))


def test_the_index_of_a_distributed_checkpoint_is_not_run(tmp_path):
    folder, trace = tmp_path / "d", tmp_path / "trace"
    save_distributed({"model": draw(1)[0].state_dict()}, folder)
    change_index(folder, lambda metadata: setattr(metadata, "planner_data", Harmful(trace)))
    for content in (
        None,
        pickle.dumps(Harmful(trace)),
        b"\x80\x04r\xff\xff\xff\x7f.",
        b"",
        b"\x80\x04]" * 5,
        b"x" * 99,
    ):
        if content is not None:
            (folder / ".metadata").write_bytes(content)
        with pytest.raises(EnfoldError, match=r"\.metadata"):
            read(folder)
    assert not trace.exists()
