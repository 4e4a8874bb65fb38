"""The figures of docs/export.md are those of the stored benchmarks."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")


def read(name):
    return json.loads((ROOT / "results" / f"bench-{name}.json").read_text())


def table_rows():
    """Return the rows of the table from the benchmark; those of bf16 are left out, as they equal those of fp16."""
    for network, forms in read("export")["tables"].items():
        for form, row in forms.items():
            if form == "bf16":
                continue
            times = [
                f"{median:.3g} [{lower:.3g}, {upper:.3g}]"
                for median, lower, upper in (row["milliseconds"][size] for size in ("1", "128"))
            ]
            name = network if form == "torch" else ""
            quality = f"{100 * row['accuracy']:.2f} % | {row['nll']:.4f}"
            yield f"| {name} | {form} | {row['bytes'] / 1e6:.2f} MB | {times[0]} | {times[1]} | {quality} |"


def test_the_table_has_the_measured_figures():
    rows = list(table_rows())
    assert len(rows) == 25
    assert [row for row in rows if row not in PAGE] == []


def test_bf16_is_as_large_and_as_fast_as_fp16():
    for forms in read("export")["tables"].values():
        assert forms["bf16"]["bytes"] == forms["fp16"]["bytes"]
        (_, low, high), (median, _, _) = (forms[kind]["milliseconds"]["128"] for kind in ("fp16", "bf16"))
        assert 0.95 * low <= median <= 1.05 * high


def test_the_server_has_the_measured_figures():
    found = read("serving")
    line = (
        f"{found['requests per second']:.0f} requests per second, with a median of {found['median ms']:.1f} ms and "
        f"{found['95 % ms']:.1f} ms for 95 %"
    )
    assert line in " ".join(PAGE.split())
