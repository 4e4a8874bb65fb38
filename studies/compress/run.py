"""Cells of the study: one setting, seed and row. Each is stored when it is finished."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import enfold
from enfold.data import Data
from enfold.distill.answers import Answers, shared_answers
from enfold.evaluate import best_member, mean_member_score, predict, score
from enfold.io.files import write_json
from enfold.saving import versions
from enfold.tasks import as_task
from enfold.train import TrainConfig
from studies.compress.rows import ROWS, Row
from studies.compress.settings import MEMBERS, SETTINGS, Setting

Scores = dict[str, Any]


class Cells:
    """All cells of one setting and seed.

    Args:
        name: Name of the setting.
        seed: The seed.
        folder: Where networks and scores are stored.
    """

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.setting: Setting = SETTINGS[name]
        self.name, self.seed, self.folder = name, seed, folder / f"{name}-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data: Data = self.setting.data(seed)
        self.make = self.setting.make(self.data)
        self.task = as_task(self.setting.members.task)
        self.ensemble = enfold.DeepEnsemble(self.members()).eval()
        self.ensemble.task = self.task
        self.answers = Answers()

    # Members

    def members(self) -> list[nn.Module]:
        """Return the members, trained once; those of an ensemble see the same data as those trained alone."""
        if self.setting.given is not None:
            return [each.eval() for each in self.setting.given(self.folder, self.seed)]
        networks, files = [], [self.folder / f"member-{index}.safetensors" for index in range(MEMBERS)]
        for index in range(MEMBERS):
            torch.manual_seed(1000 * self.seed + index)
            networks.append(self.make())
        train, config = self.data.replace(val=[]), self.setting.members.replace(seed=self.seed)
        missing = [index for index, file in enumerate(files) if not file.exists()]
        if missing and self.setting.stacked:
            timer, ensemble = Timer(), enfold.DeepEnsemble(networks)
            enfold.fit(ensemble, train, config=config, quiet=True)
            networks = ensemble.networks()
            for network, file in zip(networks, files, strict=True):
                store(network, file, timer)
            missing = []
        for index in missing:
            timer = Timer()
            enfold.fit(networks[index], train, config=config.replace(first_member=index), quiet=True)
            store(networks[index], files[index], timer)
        for network, file in zip(networks, files, strict=True):
            network.load_state_dict(load_file(file))
        return [network.eval() for network in networks]

    def references(self) -> Scores:
        """Return the scores of members and ensemble, and on training examples."""
        predicted = {part: self.predict(self.ensemble, part) for part in ("test", "val", "train")}
        test, val, train = (predicted[part] for part in ("test", "val", "train"))
        return {
            "mean member": mean_member_score(test, val),
            "ensemble": score(test, val),
            "mean member on validation": mean_member_score(val),
            "ensemble on validation": score(val),
            "mean member on training": mean_member_score(train),
            "ensemble on training": score(train),
        }

    def predict(self, model: nn.Module, part: str) -> Any:
        """Return the predictions for a part of the data."""
        return predict(model, getattr(self.data, part), task=self.setting.members.task)

    def scores(self, network: nn.Module) -> Scores:
        """Return the scores of a network on test examples, and on validation examples, by which is chosen."""
        test, val = self.predict(network, "test"), self.predict(network, "val")
        return {"test": score(test, val), "val": score(val)}

    def best_member(self) -> nn.Module:
        """Return a copy of the member with the lowest criterion on validation examples."""
        index = best_member(self.ensemble, self.data, self.setting.members.task)
        return self.ensemble.networks()[index]

    # Rows

    def config(self, row: Row) -> TrainConfig:
        """Return the settings of a row."""
        rate = self.setting.members.lr if row.start == "random" else self.setting.students["lr"]
        epochs = round(row.length * self.setting.members.epochs)
        changed = {"lr": rate, "epochs": epochs, "seed": self.seed + 100, "select": "best"} | row.changes
        return self.setting.members.replace(**changed)

    def train(self, name: str) -> Scores:
        """Train one row, and return its scores after the last and after the best epoch."""
        row, file = ROWS[name], self.folder / f"{slug(name)}.checkpoint"
        config, data, timer = self.config(row), self.data, Timer()
        if row.unlabelled:
            assert self.setting.all_data is not None  # noqa: S101 - rows are chosen by hand
            own: Any = data.train
            every: Any = self.setting.all_data(self.seed).train
            data = data.replace(train=every)  # normalized as the members' images
            config = config.replace(epochs=round(config.epochs * len(own) / len(every)))
        common: dict[str, Any] = {"config": config, "checkpoint": file, "quiet": True}
        if row.labels == 1 and row.perturb is None:
            network = enfold.train_control(self.ensemble, data, **common)
        else:
            init: Any = self.best_member() if row.start == "member" else "random"
            with shared_answers(self.answers):
                network = enfold.distill(
                    self.teacher(row), data, init=init, loss=row.loss, perturb=row.perturb, **common
                )
        found = {"epochs": config.epochs, "best": self.scores(network.eval()), **timer.read()}
        prefix = "average/" if config.ema else "model/"
        last = {key.removeprefix(prefix): value for key, value in load_file(file).items() if key.startswith(prefix)}
        network.load_state_dict({**network.state_dict(), **last})
        file.unlink()
        return {**found, "last": self.scores(network.eval())}

    def teacher(self, row: Row) -> Any:
        """Return what the student learns from."""
        if row.targets == "fresh":
            return self.ensemble
        train: Any = self.data.train
        with torch.no_grad():
            parts = [self.ensemble(part) for part in self.data.prepare(train.inputs).split(1000)]
        return enfold.CachedTeacher(torch.cat(parts, dim=1))

    def compress(self) -> Scores:
        """Return what `compress` recommends with the settings of the members, and its table."""
        timer = Timer()
        config = self.config(Row())
        folder = self.folder / "compress"
        result = enfold.compress(self.ensemble, self.data, config=config, folder=folder, quiet=False)
        trials = [
            {"name": each.name, "epochs": each.epochs, "gain": each.gain, "note": each.note, "seconds": each.seconds}
            | {key: each.scores.get(key) for key in ("nll", "accuracy")}
            for each in result.trials
        ]
        found = self.scores(result.network)
        known = {"name": result.chosen.name, "trials": trials, "text": str(result)}
        return {**timer.read(), "best": found, "last": found, **known}

    def cell(self, name: str) -> Scores:
        """Return a stored cell; compute and store it if there is none."""
        file = self.folder / f"{slug(name)}.json"
        if not file.exists():
            special: dict[str, Callable[[], Scores]] = {"references": self.references, "compress": self.compress}
            made = special[name]() if name in special else self.train(name)
            write_json(file, {**made, "versions": versions(), "date": time.strftime("%Y-%m-%d"), "machine": machine()})
        found: Scores = json.loads(file.read_text(encoding="utf-8"))
        return found


def store(network: nn.Module, file: Path, timer: Timer) -> None:
    """Write a network and the duration of its training."""
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, file)
    write_json(file.with_suffix(".json"), timer.read())


class Timer:
    """Wall-clock and processor time since it was made."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def read(self) -> Scores:
        """Return both in seconds."""
        return {
            "seconds": round(time.perf_counter() - self.wall, 1),
            "processor seconds": round(time.process_time() - self.processor, 1),
        }


def slug(name: str) -> str:
    """Return a name for a file."""
    return "".join(each if each.isalnum() or each == "." else "-" for each in name)


def machine() -> str:
    """Return the processor and the number of threads."""
    names = [line.split(":")[1].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
