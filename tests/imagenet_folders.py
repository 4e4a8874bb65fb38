"""A generated folder of images in the layout of TinyImageNet."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

WNIDS = ("n01440764", "n02012849", "n03126707")


def save(file: Path, value: int, size: int = 8) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (value, 10, 20)).save(file, quality=95)


def tiny(folder: Path, size: int = 8) -> Path:
    """TinyImageNet: a class has one shade of red."""
    for label, wnid in enumerate(WNIDS):
        for number in range(20):
            save(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", 80 * label, size)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t1\t1\n")
    lines = []
    for number in range(6):
        wnid = WNIDS[number % 3]
        save(folder / "val" / "images" / f"val_{number}.JPEG", 80 * (number % 3), size)
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t7\t7\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    save(folder / "test" / "images" / "test_0.JPEG", 0)  # without a public label
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in WNIDS))
    (folder / "words.txt").write_text("n01440764\ttench, Tinca tinca\nn02012849\tcrane\nn03126707\tlathe\n")
    return folder
