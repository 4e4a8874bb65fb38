"""Titles and columns of the models in the tables of the pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table: where its value is in a row, and how it is shown."""

    heading: str
    group: str
    key: str
    scale: float
    digits: int


QUALITY = (
    Column("accuracy (%)", "scores", "accuracy", 100, 2),
    Column("NLL (nats)", "scores", "nll", 1, 3),
    Column("ECE (%)", "scores", "ece", 100, 2),
)
CORRUPTED = (
    Column("corrupted: accuracy (%)", "corrupted", "accuracy", 100, 2),
    Column("NLL", "corrupted", "nll", 1, 3),
    Column("ECE (%)", "corrupted", "ece", 100, 2),
)
GAIN = Column("gain recovered (%)", "", "gain_recovered", 100, 0)
OOD_COLUMNS = (*QUALITY, *CORRUPTED)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "cifar10-ensembles": (
        *QUALITY,
        Column("diversity", "diversity", "normalised_disagreement", 1, 2),
        Column("one member (%)", "diversity", "member_accuracy", 100, 2),
        Column("parameters", "cost", "parameters", 1, 0),
        Column("MFLOPs", "cost", "flops", 1e-6, 1),
    ),
    "cifar10-distillation": (
        *QUALITY,
        Column("cNLL", "scores", "cnll", 1, 3),
        Column("cECE (%)", "scores", "cece", 100, 2),
        GAIN,
        *CORRUPTED,
    ),
    "permavg-options": (*QUALITY, GAIN),
    "permavg-attention": (*QUALITY, GAIN),
}
OOD_SCORES = {"entropy": "entropy", "energy": "energy", "mutual_information": "mutual information"}
RUN_TITLES = {  # titles in one table
    "permavg-options": {
        "ensemble": "deep ensemble of 6",
        "control": "control: best member, trained for 20 more epochs",
        "control-2": "control: 5 more epochs",
        "control-3": "control: 1 more epoch",
    },
    "permavg-attention": {
        "ensemble": "deep ensemble of 2",
        "control": "control: best member, trained for 20 more epochs",
        "control-2": "control: 5 more epochs",
        "control-3": "control: 25 more epochs",
        "matched": "matched, averaged",
        "published": "permAVG as published, 20 epochs",
        "matched-start": "permAVG initialized at a matching, 5 epochs",
        "taught": "+ targets from the ensemble",
        "taught-distilled": "+ distilled for 20 epochs",
    },
}
OOD_TITLES = {
    "ensemble": "deep ensemble",
    "batch-ensemble": "BatchEnsemble",
    "kd": "KD",
    "latent-be": "LatentBE",
    "control-2": "control: trained as long as the merge",
    "merge": "members merged, then distilled",
}
TITLES = {
    "mean member": "one network (mean member)",
    "ensemble": "deep ensemble of 4",
    "control": "control: best member, trained further",
    "control-2": "control: with gradient clipping",
    "single-48-epochs": "control: one network, 48 epochs",
    "batch-ensemble": "BatchEnsemble, joint batch norm",
    "batch-ensemble-bn": "BatchEnsemble + EnsembleBN",
    "mimo": "MIMO, M = 3",
    "mc-dropout": "MC dropout 0.1, 4 samples",
    "swag": "SWAG, rank 20, 30 samples",
    "tree-net": "TreeNet",
    "mixture-0.4": "MixtureEnsemble, 0.4 networks",
    "mixture-1.0": "MixtureEnsemble, 1 network",
    "mixture-3.3": "MixtureEnsemble, 3.3 networks",
    "mixture-thin": "thin MixtureEnsemble, 1 network",
    "kd": "KD, temperature 4",
    "ae-kd": "AE-KD",
    "proxy-end2": "Proxy-EnD²",
    "latent-be": "KD + LatentBE",
    "latent-be-confods": "KD + LatentBE + ConfODS",
    "latent-be-tdiv-sdiv": "KD + LatentBE + TDiv-SDiv",
    "average": "plain average",
    "matched-average": "matched, averaged",
    "matched-average-repaired": "matched, averaged, REPAIR",
    "published": "permAVG as published, 20 epochs, batch size 256",
    "published-5-epochs": "permAVG as published, 5 epochs (also all rows below)",
    "ridge": "+ ridge 0.1",
    "matched-12": "initialized at a matching, scale 12",
    "matched-4": "initialized at a matching, scale 4 (also all rows below)",
    "sequential": "one member after the other, 1 epoch each",
    "taught": "targets from the ensemble",
    "gain": "a gain for each unit",
    "universe": "universe instead of member 1 as reference",
    "annealed": "temperature annealed to 0.3",
    "dirichlet": "random averaging weights",
    "projected": "projected to permutations at the end",
    "projected-repaired": "projected, REPAIR",
    "annealed-projected": "annealed to 0.3 and projected",
    "few-iterations": "20 Sinkhorn iterations, warm start",
    "lone-student": "lone student: KD, temperature 1",
    "be-head": "BatchEnsemble student, one teacher per member",
    "be-mean": "BatchEnsemble student, mean of teachers",
    "be-mean-3": "BatchEnsemble student of 3, mean of teachers",
    "be-mean-8": "BatchEnsemble student of 8, mean of teachers",
    "be-als": "BatchEnsemble student, mean of teachers, ALS initialization",
    "be-tie-mean": "BatchEnsemble student, one teacher per member, L2 penalty 0.1 (mean)",
    "be-tie": "BatchEnsemble student, one teacher per member, L2 penalty 0.1 (sum)",
}
