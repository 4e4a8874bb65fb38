"""Dictionary batches: three small BERT classifiers of transformers, distilled to one, saved and loaded.

A loader of tokenized texts yields dictionaries with `input_ids`, `attention_mask` and `labels`. They go to `fit`,
`distill` and `evaluate` as they are; networks may return an object with `logits`.
"""

import torch
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import enfold

PAD, START, GOOD, BAD = 0, 1, range(2, 12), range(12, 22)  # of 60 words


def make_reviews(number: int, seed: int = 0) -> list[dict[str, object]]:
    """Draw texts of 5 to 15 words, of which some are good and some are bad; the label is the majority."""
    rng = torch.Generator().manual_seed(seed)
    reviews: list[dict[str, object]] = []
    while len(reviews) < number:
        length = int(torch.randint(5, 16, (1,), generator=rng))
        words = torch.randint(2, 60, (length,), generator=rng).tolist()
        total = sum((word in GOOD) - (word in BAD) for word in words)
        if total:
            reviews.append({"input_ids": [START, *words], "labels": int(total > 0)})
    return reviews


def collate(rows: list[dict[str, list[int]]]) -> BatchEncoding:
    """Pad the texts of a batch to one length, as the collators of transformers do."""
    longest = max(len(row["input_ids"]) for row in rows)
    words = torch.tensor([row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return BatchEncoding({"input_ids": words, "attention_mask": (words != PAD).long(), "labels": labels})


def make_net() -> torch.nn.Module:
    """Return a BERT with two layers and random weights."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=2, **size))


def main() -> None:
    """Train, distil, save, load and predict."""
    parts = {"train": make_reviews(1200), "val": make_reviews(200, seed=1), "test": make_reviews(500, seed=2)}
    train, val, test = (
        DataLoader(rows, batch_size=64, shuffle=name == "train", collate_fn=collate) for name, rows in parts.items()
    )
    ensemble = enfold.DeepEnsemble(make_net, 3)
    enfold.fit(ensemble, train, val, epochs=8, lr=3e-3, quiet=True)
    net = enfold.distill(ensemble, train, val, epochs=5, lr=1e-3, quiet=True)
    control = enfold.train_control(ensemble, train, val, epochs=5, lr=1e-3, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    # The distilled network is a BertForSequenceClassification with its own keys.
    enfold.save(net, "runs/bert.safetensors")
    loaded = enfold.load("runs/bert.safetensors", make_net)
    batch = collate(make_reviews(2, seed=3))
    del batch["labels"]
    print(
        "classes",
        loaded(**batch).logits.argmax(1).tolist(),
        "of the ensemble",
        ensemble.predict(**batch).classes.tolist(),
    )


if __name__ == "__main__":
    main()
