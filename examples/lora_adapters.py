"""LoRA adapters of peft: three adapters of one BERT are an ensemble, which is merged and distilled to one network."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import enfold

Texts = tuple[torch.Tensor, torch.Tensor]


def make_texts(number: int, seed: int, first: int) -> Texts:
    """Draw texts of 12 words; the class is 1 if more of them are among ten from `first` on than among ten others."""
    words = torch.randint(1, 60, (2 * number, 12), generator=torch.Generator().manual_seed(seed))
    total = ((words >= first) & (words < first + 10)).sum(1) - ((words >= 40) & (words < 50)).sum(1)
    decided = total.nonzero()[:number, 0]
    return words[decided], (total[decided] > 0).long()


def make_net() -> torch.nn.Module:
    """Return a BERT with two layers and random weights."""
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=2, **size))


def train_adapter(base: torch.nn.Module, texts: Texts, seed: int, folder: Path) -> None:
    """Train an adapter in a plain loop, and save it as peft does."""
    torch.manual_seed(seed)
    base = enfold.DeepEnsemble([base]).member(0)  # a copy
    options = {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["query", "value", "dense"]}
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", **options))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for _ in range(3):
        for words, labels in DataLoader(TensorDataset(*texts), batch_size=50, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(words).logits, labels).backward()
            optimizer.step()
    model.save_pretrained(folder)


def main() -> None:
    """Pretrain a base, train adapters for another problem, read them as members, merge and distil."""
    torch.manual_seed(0)
    base = make_net()
    enfold.fit(base, make_texts(1000, 0, 1), epochs=6, lr=3e-3, select="last", quiet=True)
    train, val, test = (make_texts(number, seed, 6) for seed, number in ((1, 300), (2, 200), (3, 1000)))

    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(3):
            train_adapter(base, train, seed, Path(temporary) / f"adapter-{seed}")
        ensemble = enfold.DeepEnsemble.from_checkpoints(temporary, base)  # the base with each adapter
    models = {"base": base, "member 0": ensemble.member(0), "ensemble": ensemble}
    models["merged"] = enfold.merge.lora(ensemble, base=base, rank=4)  # a mean of products B A, again of rank 4
    models["distilled"] = enfold.distill(ensemble, train, val, epochs=4, lr=1e-3, quiet=True)
    for name, model in models.items():
        print(enfold.evaluate(model, test, reference=ensemble, name=name))


if __name__ == "__main__":
    main()
