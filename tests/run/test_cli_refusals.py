"""Wrong input of the command line: one sentence, and nothing is written."""

from pathlib import Path

import numpy as np
import pytest


def _wrong_path(tmp_path: Path, data: Path) -> list[object]:
    return ["train", tmp_path / "out", "--data", tmp_path / "nowhere.npz"]


def _truncated_idx(tmp_path: Path, data: Path) -> list[object]:
    folder = tmp_path / "root" / "mnist"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 4, 0, 0, 0, 4, 1]))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 9] + 9 * [1]))
    return ["train", tmp_path / "out", "--data", "mnist"]


def _labels_out_of_range(tmp_path: Path, data: Path) -> list[object]:
    stored = dict(np.load(data))
    stored["y_test"] = stored["y_test"] - 3
    np.savez(tmp_path / "labels.npz", **stored)
    return ["train", tmp_path / "out", "--data", tmp_path / "labels.npz"]


def _nan_in_the_data(tmp_path: Path, data: Path) -> list[object]:
    stored = {name: array.astype(np.float32) if name[0] == "x" else array for name, array in np.load(data).items()}
    stored["x_train"][3, 0, 1, 1] = np.nan
    np.savez(tmp_path / "nan.npz", **stored)
    return ["train", tmp_path / "out", "--data", tmp_path / "nan.npz"]


def _no_members(tmp_path: Path, data: Path) -> list[object]:
    return ["train", tmp_path / "out", "--data", data, "--members", 0]


def _unknown_method(tmp_path: Path, data: Path) -> list[object]:
    (tmp_path / "r.yaml").write_text(f"data: {data}\nsteps: [averag]\n")
    return ["run", tmp_path / "r.yaml", tmp_path / "out"]


def _typo(tmp_path: Path, data: Path) -> list[object]:
    (tmp_path / "r.yaml").write_text(f"data: {data}\nmembers: 2\ntrain:\n  epocs: 3\n")
    return ["run", tmp_path / "r.yaml", tmp_path / "out"]


def _unknown_network(tmp_path: Path, data: Path) -> list[object]:
    return ["train", tmp_path / "out", "--data", data, "--network", "resnet21"]


def _name_with_a_key(tmp_path: Path, data: Path) -> list[object]:
    return ["train", tmp_path / "out", "--data", data, "--set", "network.widths=[32,32]"]


def _unknown_device(tmp_path: Path, data: Path) -> list[object]:
    return ["train", tmp_path / "out", "--data", data, "--device", "tpu"]


@pytest.mark.parametrize(
    ("arrange", "says"),
    [
        (_wrong_path, ["nowhere.npz"]),
        (_truncated_idx, ["train-images-idx3-ubyte"]),
        (_labels_out_of_range, ["label", "-3"]),
        (_nan_in_the_data, ["nan.npz"]),
        (_no_members, ["members", "1"]),
        (_unknown_method, ["line 2", "averag", "did you mean 'average'"]),
        (_typo, ["line 4", "epocs", "did you mean 'epochs'"]),
        (_unknown_network, ["resnet21", "resnet20"]),
        (_name_with_a_key, ["--set 'network={name: mlp, widths: [32, 32]}'"]),
        (_unknown_device, ["tpu", "cpu"]),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    enfold, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_data: Path, arrange, says: list[str]
) -> None:
    monkeypatch.setenv("ENFOLD_DATA", str(tmp_path / "root"))
    done = enfold(*arrange(tmp_path, small_data))
    assert done.code == 2
    assert done.err.startswith("enfold: ")
    assert done.err.count("\n") == 1, "one sentence"
    for word in says:
        assert word in done.err
    assert not (tmp_path / "out").exists()
