"""Memory of a pass over streams of three sizes: it does not grow with the data.

Writes results/bench-streams.json. Each size is measured in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from enfold.data import Stream
from enfold.io.files import write_json
from enfold.saving import versions

RESULT = Path(__file__).parent.parent / "results" / "bench-streams.json"
SIZES = (20_000, 80_000, 320_000)
SHARD, WIDTH = 10_000, 256


def write(folder: Path, examples: int) -> None:
    """Write shards of random examples."""
    import pyarrow
    from pyarrow import parquet

    for index in range(examples // SHARD):
        draws = np.random.default_rng(index)
        inputs = pyarrow.FixedSizeListArray.from_arrays(draws.random(SHARD * WIDTH, dtype=np.float32), WIDTH)
        table = pyarrow.table({"x": inputs, "y": draws.integers(10, size=SHARD)})
        parquet.write_table(table, folder / f"{index:04d}.parquet")


def peak_mib() -> float:
    """Return the peak memory of this process; ru_maxrss would include that of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(line for line in lines if line.startswith("VmHWM"))
    return round(int(peak.split()[1]) / 1024, 1)


def read(folder: str) -> None:
    """Read all batches once, and print the peak memory of this process."""
    before = peak_mib()
    examples = sum(len(targets) for _, targets in Stream(f"{folder}/*.parquet", inputs="x", target="y", shuffle=2000))
    print(json.dumps({"examples": examples, "start_mib": before, "peak_mib": peak_mib()}))


def main() -> None:
    """Measure and write the record."""
    if len(sys.argv) > 1:
        read(sys.argv[1])
        return
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), size)
            mib = sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20
            words = [sys.executable, __file__, folder]
            started = time.perf_counter()
            done = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603 - this file
            seconds = time.perf_counter() - started
            rows.append({**json.loads(done.stdout), "data_mib": round(mib, 1), "seconds": round(seconds, 1)})
            print(rows[-1], flush=True)
    write_json(
        RESULT,
        {"command": "python bench/streams.py", "date": time.strftime("%Y-%m-%d"), "versions": versions(), "rows": rows},
    )


if __name__ == "__main__":
    main()
