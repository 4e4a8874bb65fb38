"""Token classification: three small BERT taggers of transformers, distilled to one, and an average of fine-tuned ones.

Batches are dictionaries with `labels`, as a data collator makes them; everything else goes to the network by keyword.
Positions with the label -100, such as padding, are neither trained nor scored.
"""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

import enfold

WORDS, TAGS = 200, 8


def make_sentences(number: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Draw sentences of 6 to 20 words from a hidden Markov model, the same for every seed.

    The tags are a Markov chain in which each tag has about two likely successors. Each tag emits about 50 of the 200
    words, so that a word leaves several tags possible and the neighbours on both sides help. The word 0 is the padding.
    """
    fixed = torch.Generator().manual_seed(0)
    follows = torch.softmax(3 * torch.randn(TAGS, TAGS, generator=fixed), dim=1)
    emits = torch.softmax(2 * torch.randn(TAGS, WORDS - 1, generator=fixed), dim=1)
    rng = torch.Generator().manual_seed(1000 + seed)
    sentences = []
    for length in torch.randint(6, 21, (number,), generator=rng).tolist():
        tags = [int(torch.randint(TAGS, (1,), generator=rng))]
        while len(tags) < length:
            tags.append(int(torch.multinomial(follows[tags[-1]], 1, generator=rng)))
        words = 1 + torch.multinomial(emits[tags], 1, generator=rng)[:, 0]
        sentences.append({"input_ids": words.tolist(), "labels": tags})
    return sentences


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the sentences of a batch to one length."""
    longest = max(len(row["labels"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    words = padded("input_ids", 0)
    return {"input_ids": words, "attention_mask": (words > 0).long(), "labels": padded("labels", -100)}


def make_net() -> torch.nn.Module:
    """Return a BERT with two layers and random weights."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForTokenClassification(BertConfig(vocab_size=WORDS, num_labels=TAGS, **size))


def main() -> None:
    """Train, distil, average and compare."""
    parts = {"train": make_sentences(400), "val": make_sentences(100, seed=1), "test": make_sentences(300, seed=2)}
    train, val, test = (
        DataLoader(rows, batch_size=32, shuffle=name == "train", collate_fn=collate) for name, rows in parts.items()
    )
    ensemble = enfold.DeepEnsemble(make_net, 3)
    enfold.fit(ensemble, train, val, epochs=10, lr=5e-3, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble}
    models["distilled"] = enfold.distill(ensemble, train, val, epochs=8, lr=3e-3, quiet=True)
    models["control"] = enfold.train_control(ensemble, train, val, epochs=8, lr=3e-3, quiet=True)

    # Networks that were fine-tuned from the same weights can be averaged; independently trained ones cannot.
    tuned = [
        enfold.train_control(ensemble, train, val, epochs=2, lr=1e-3, seed=seed, select="last", quiet=True)
        for seed in range(2)
    ]
    models["average of fine-tuned"] = enfold.merge.average(tuned)
    models["average of members"] = enfold.merge.average(ensemble)
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))


if __name__ == "__main__":
    main()
