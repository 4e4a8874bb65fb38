"""Checkpoints as other packages write them, by these packages where they are installed."""

import json
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim.swa_utils import AveragedModel

import enfold
from enfold import DeepEnsemble, EnfoldError

pytestmark = pytest.mark.filterwarnings("ignore")


def make():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def draw(count=3):
    networks = [make() for _ in range(count)]
    for network in networks:
        network(torch.randn(16, 4))
    return [network.eval() for network in networks]


def assert_loaded(members, networks):
    assert members.num_members == len(networks)
    for member, network in zip(members.networks(), networks, strict=True):
        assert not member.training
        for name, tensor in network.state_dict().items():
            assert torch.equal(member.state_dict()[name], tensor), name


def read(files, network=make, **options):
    return DeepEnsemble.from_checkpoints(files, network, **options)


# Lightning


def lightning_module(network, name):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"lr": np.float64(0.1), "widths": [8]})
            setattr(self, name, network)
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(3))

        def training_step(self, batch, index):
            return self.criterion(getattr(self, name)(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Module()


def train_with_lightning(network, name, folder, callbacks=()):
    from lightning import Trainer

    batches = torch.utils.data.DataLoader([(torch.randn(4), index % 3) for index in range(8)], batch_size=4)
    module = lightning_module(network, name)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, batches)
    trainer.save_checkpoint(folder / "last.ckpt")


@pytest.mark.parametrize(("name", "key"), [("model", None), ("net", None), ("backbone", "backbone"), ("head", "head.")])
def test_lightning(name, key, tmp_path):
    pytest.importorskip("lightning")
    network = make()
    train_with_lightning(network, name, tmp_path)
    assert_loaded(read(tmp_path / "last.ckpt", key=key), [network])
    if key:
        with pytest.raises(EnfoldError, match=rf"key='{name}\.'"):
            read(tmp_path / "last.ckpt")


def test_lightning_with_averaged_weights(tmp_path):
    pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("lightning is too old")
    network = make()
    during = callbacks.ModelCheckpoint(tmp_path, "during", every_n_train_steps=2)
    average = callbacks.EMAWeightAveraging(decay=0.5)
    train_with_lightning(network, "model", tmp_path, [average, during])
    content = torch.load(tmp_path / "during.ckpt", weights_only=False)
    averaged, current = (read(tmp_path / "during.ckpt", key=key) for key in (None, "current_model_state"))
    assert torch.equal(averaged[0][0].weight, content["state_dict"]["model.0.weight"])
    assert torch.equal(current[0][0].weight, content["current_model_state"]["model.0.weight"])
    assert not torch.equal(averaged[0][0].weight, current[0][0].weight)


def test_two_networks_in_one_file_are_not_guessed(tmp_path):
    student, teacher = draw(2)
    torch.save({"state_dict": nn.ModuleDict({"model": student, "ema": teacher}).state_dict()}, tmp_path / "a.ckpt")
    torch.save({"state_dict": student.state_dict(), "state_dict_ema": teacher.state_dict()}, tmp_path / "b.pth")
    for name, keys in (("a.ckpt", ("model", "ema.")), ("b.pth", ("state_dict", "state_dict_ema"))):
        with pytest.raises(EnfoldError, match="key="):
            read(tmp_path / name)
        for key, network in zip(keys, (student, teacher), strict=True):
            assert_loaded(read(tmp_path / name, key=key), [network])
        with pytest.raises(EnfoldError, match=r"key must be a key of .* got 'other'|must have one state dict"):
            read(tmp_path / name, key="other")


def test_averaged_and_compiled_models(tmp_path):
    network = draw(1)[0]
    averaged = AveragedModel(network)
    compiled = nn.Sequential(*(torch.compile(each) for each in network))
    torch.save(averaged.state_dict(), tmp_path / "a.pt")
    torch.save({"model": torch.compile(network).state_dict()}, tmp_path / "b.pt")
    torch.save(compiled.state_dict(), tmp_path / "c.pt")
    assert any("_orig_mod" in name for name in compiled.state_dict())
    assert_loaded(read(tmp_path / "*.pt"), [network] * 3)


# transformers


def bert(layers=1):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config)


def test_folders_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    networks = [bert() for _ in range(3)]
    networks[0].save_pretrained(tmp_path / "runs" / "checkpoint-5")
    networks[1].save_pretrained(tmp_path / "runs" / "checkpoint-10", max_shard_size="8KB")
    assert len(list((tmp_path / "runs" / "checkpoint-10").glob("*.safetensors"))) > 1
    (tmp_path / "runs" / "checkpoint-200").mkdir()
    torch.save(networks[2].state_dict(), tmp_path / "runs" / "checkpoint-200" / "pytorch_model.bin")
    torch.save({"lr": 0.1}, tmp_path / "runs" / "checkpoint-200" / "optimizer.pt")
    folders = [tmp_path / "runs" / f"checkpoint-{number}" for number in (5, 10, 200)]
    for files in (tmp_path / "runs", str(tmp_path / "runs" / "checkpoint-*"), folders):
        assert_loaded(read(files, bert), networks)
    assert_loaded(read(folders[1], bert), networks[1:2])


def sharded(folder, network, suffix="safetensors"):
    folder.mkdir(exist_ok=True)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    names = list(network.state_dict())
    files = {name: f"{stem}-0000{1 + index % 2}-of-00002.{suffix}" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in network.state_dict().items() if files[name] == file}
        (save_file if suffix == "safetensors" else torch.save)(part, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards(suffix, tmp_path):
    networks = draw(2)
    for index, network in enumerate(networks):
        sharded(tmp_path / f"{index}", network, suffix)
    assert_loaded(read(tmp_path), networks)
    index = next((tmp_path / "1").glob("*.index.json"))
    shard = next((tmp_path / "1").glob(f"*-00002-of-00002.{suffix}"))
    content = json.loads(index.read_text())
    for other, message in (
        ({**content["weight_map"], "0.weight": "../0/x.safetensors"}, "own folder, got '../0/x"),
        ({**content["weight_map"], "0.weight": str(shard.resolve())}, "own folder"),
        ({**content["weight_map"], "0.weight": index.name}, "own folder"),
        ({**content["weight_map"], "other": shard.name}, "'other' differs"),
        ({**content["weight_map"], "0.weight": 3}, "weight_map"),
        ([], "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": other}))
        with pytest.raises(EnfoldError, match=message):
            read(tmp_path / "1")
    index.write_text(json.dumps(content))
    shard.unlink()
    with pytest.raises(EnfoldError, match=rf"'{shard.name}' is missing \(1 in total\)"):
        read(tmp_path / "1")
    index.unlink()
    with pytest.raises(EnfoldError, match="without an index"):
        read(tmp_path / "1")


def test_a_safetensors_file_of_timm(tmp_path):
    network = draw(1)[0]
    state = network.state_dict()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18", "pretrained_cfg": {}}))
    assert_loaded(read(tmp_path), [network])
    torch.save(
        {"epoch": 3, "arch": "resnet18", "state_dict": state, "optimizer": {}, "version": 2}, tmp_path / "last.pth.tar"
    )
    assert_loaded(read(tmp_path / "last.pth.tar"), [network])


# accelerate, FSDP and torch.distributed.checkpoint


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


# nnU-Net


def nnunet(network, fold):
    """What nnU-Net writes into checkpoint_final.pth."""
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.01}]},
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float64(0.5), np.float32(0.25)], "ema_fg_dice": [np.float64(0.4)]},
        "_best_ema": np.float64(0.4),
        "current_epoch": 1000,
        "init_args": {"plans": {"spacing": np.array([1.0, 2.0])}, "fold": fold, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1),
    }


def test_fold_folders_of_nnunet(tmp_path):
    networks = draw(11)
    for index, network in enumerate(networks):
        fold = tmp_path / f"fold_{index}"
        fold.mkdir()
        torch.save(nnunet(network, index), fold / "checkpoint_final.pth")
        torch.save(nnunet(make(), index), fold / "checkpoint_best.pth")
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(fold / "checkpoint_final.pth", weights_only=True)
    assert_loaded(read(tmp_path), networks)
    assert_loaded(read(str(tmp_path / "fold_*" / "checkpoint_final.pth")), networks)
    (tmp_path / "fold_3" / "checkpoint_final.pth").unlink()
    with pytest.raises(EnfoldError, match="fold_3"):
        read(tmp_path)


def test_numbers_of_numpy_are_not_made(tmp_path, monkeypatch):
    torch.save(nnunet(draw(1)[0], 0), tmp_path / "a.pth")
    before = set(torch.serialization.get_safe_globals())
    made = []
    monkeypatch.setattr(np, "dtype", lambda *given: made.append(given))
    read(tmp_path / "a.pth")
    assert not made
    assert set(torch.serialization.get_safe_globals()) == before


# Paths


def test_compress_reads_what_members_are_read_from(tmp_path):
    networks = draw(2)
    for index, network in enumerate(networks):
        sharded(tmp_path / f"run{index}", network)
    inputs = torch.randn(60, 4)
    labels = networks[0](inputs).argmax(1)
    result = enfold.compress(
        str(tmp_path), (inputs, labels), (inputs, labels), network=make, epochs=1, quiet=True, time=5
    )
    assert isinstance(result.network, nn.Sequential)


def test_folders_that_are_ambiguous_or_empty(tmp_path):
    network = draw(1)[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(EnfoldError, match=r"'.*empty' has none"):
        read(tmp_path / "empty")
    (tmp_path / "mixed" / "a").mkdir(parents=True)
    save_file(network.state_dict(), tmp_path / "mixed" / "a" / "model.safetensors")
    save_file(network.state_dict(), tmp_path / "mixed" / "b.safetensors")
    with pytest.raises(EnfoldError, match="2 of them"):
        read(tmp_path / "mixed")
    with pytest.raises(EnfoldError, match="does not exist"):
        read([tmp_path / "nowhere"])
    assert_loaded(read([tmp_path / "mixed" / "a", tmp_path / "mixed" / "b.safetensors"]), [network] * 2)


def test_the_nearest_name_is_shown(tmp_path):
    state = {name.replace("3.weight", "3.weights"): tensor for name, tensor in draw(1)[0].state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(EnfoldError, match=r"it lacks '3\.weight' .*nearest '3\.weights'"):
        read(tmp_path / "a.safetensors")
