"""Run the Python blocks of a Markdown file, in order and in one namespace, in an empty folder."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(path: Path) -> None:
    """Run every block; a failure shows the README's own line."""
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    if not blocks:
        raise SystemExit(f"{path} has no Python block to run")
    namespace: dict[str, object] = {"__name__": "readme"}
    os.chdir(tempfile.mkdtemp())
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block.group(1), str(path), "exec")
        exec(code, namespace)  # noqa: S102 - that is what this file is for
    print(f"{path.name}: {len(blocks)} Python blocks ran")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
