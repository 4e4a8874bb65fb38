"""Write the names of all methods into TYPE_CHECKING blocks, for type checkers and editors.

Python finds methods by the names of their files, which type checkers cannot follow. Nothing else needs these blocks.

python tools/make_method_names.py           write the blocks
python tools/make_method_names.py --check   exit with 1 if a block is out of date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from enfold.method_files import class_names, is_name_of, method_files

SOURCE = Path(__file__).parent.parent / "src" / "enfold"
CLASSES = ("ensembles", "distill.losses", "distill.perturb")
AT_RUN_TIME = ("DeepEnsemble", "MixedEnsemble")  # imported by enfold/__init__.py
BLOCK = re.compile(r"(if TYPE_CHECKING:  # names of methods, written by[^\n]*\n)(?:    [^\n]*\n)+")


def imports(package: str) -> list[str]:
    """Return one import for each class of a package."""
    folder = SOURCE.joinpath(*package.split("."))
    files = method_files([str(folder)])
    pairs = [(next(file for file in files if is_name_of(file, name)), name) for name in class_names(folder)]
    return [f"    from enfold.{package}.{file} import {name} as {name}\n" for file, name in sorted(pairs)]


def blocks() -> dict[Path, list[str]]:
    """Return the lines of the block of each file."""
    top = [line for package in sorted(CLASSES) for line in imports(package)]
    merges = [
        f"    from enfold.merge.{file} import {file} as {file}\n" for file in method_files([str(SOURCE / "merge")])
    ]
    return {
        SOURCE / "__init__.py": [line for line in top if line.split()[-1] not in AT_RUN_TIME],
        SOURCE / "ensembles" / "__init__.py": imports("ensembles"),
        SOURCE / "merge" / "__init__.py": merges,
    }


def main(check: bool) -> int:
    """Write the blocks that are out of date, or only name them."""
    code = 0
    for file, lines in blocks().items():
        text = file.read_text(encoding="utf-8")
        new, count = BLOCK.subn(lambda found, lines=lines: found[1] + "".join(lines), text)  # type: ignore[misc]
        if count != 1:
            raise SystemExit(f"{file}: there must be one block of methods, found {count}")
        if new == text:
            continue
        if check:
            print(f"{file} is out of date: run make generated", file=sys.stderr)
            code = 1
        else:
            file.write_text(new, encoding="utf-8")
            print(f"written: {file}", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main("--check" in sys.argv[1:]))
