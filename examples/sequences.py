"""Sequences of different lengths: three LSTM taggers with packed sequences, distilled to one.

Batches are (words, lengths, tags). The network takes two inputs, so the third element is the target; the padding of the
tags is -100, which is neither trained nor scored.
"""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import enfold

WORDS = 30


class Tagger(nn.Module):
    """A bidirectional LSTM with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits of each word."""
        packed = pack_padded_sequence(self.embed(words), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.head(states)


def make_sentence(rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words whose tags follow from the word itself and, for one in three, from the words on both sides."""
    words = torch.randint(1, WORDS, (int(torch.randint(4, 14, (1,), generator=rng)),), generator=rng)
    before, after = words.roll(1), words.roll(-1)
    tags = torch.where(words % 3 == 0, (before < after).long(), words % 3)
    noise = torch.rand(len(tags), generator=rng) < 0.1
    return words, torch.where(noise, torch.randint(3, tags.shape, generator=rng), tags)


def collate(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Pad words with 0 and tags with -100."""
    words, tags = zip(*batch, strict=True)
    lengths = torch.tensor([len(each) for each in words])
    return pad_sequence(words, batch_first=True), lengths, pad_sequence(tags, batch_first=True, padding_value=-100)


def main() -> None:
    """Train, distil and compare."""
    rng = torch.Generator().manual_seed(0)
    sentences = [make_sentence(rng) for _ in range(1000)]
    train = DataLoader(sentences[:500], batch_size=32, shuffle=True, collate_fn=collate)
    val = DataLoader(sentences[500:600], batch_size=100, collate_fn=collate)
    test = DataLoader(sentences[600:], batch_size=100, collate_fn=collate)

    ensemble = enfold.DeepEnsemble(Tagger, 3)
    enfold.fit(ensemble, train, val, epochs=12, lr=1e-2, quiet=True)
    net = enfold.distill(ensemble, train, val, epochs=8, lr=3e-3, quiet=True)
    control = enfold.train_control(ensemble, train, val, epochs=8, lr=3e-3, quiet=True)
    models = {"member 0": ensemble.member(0), "ensemble": ensemble, "distilled": net, "control": control}
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))

    words, lengths, _ = next(iter(test))
    prediction = ensemble.predict(words, lengths)
    print("probabilities", tuple(prediction.mean.shape), "tags of the first sentence", prediction.classes[0].tolist())


if __name__ == "__main__":
    main()
