"""The list of items names what exists and claims no more than is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.items import ROOT, check_items, items_table, load_items

GOOD = {"what": "KD", "where": "src/enfold/distill/losses/kd.py", "run": "latentbe-cifar10", "status": "complete"}
RESULT = "studies/latentbe/results/latentbe-cifar10.json"


def written(folder: Path, **changes: str) -> Path:
    """A list with one item."""
    item = {**GOOD, "result": RESULT, **changes}
    file = folder / f"{abs(hash(str(changes)))}.yaml"
    lines = [f"    {key}: {value!r}" for key, value in item.items() if value]
    file.write_text("A work:\n  -\n" + "\n".join(lines) + "\n")
    return file


def test_the_list_is_true():
    assert not list(check_items())
    assert sum(map(len, load_items().values())) == 113


def test_a_good_item_has_no_problem(tmp_path):
    assert not list(check_items(written(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"where": "src/enfold/absent.py"}, "there is no src/enfold/absent.py"),
        ({"result": "studies/absent.json"}, "there is no studies/absent.json"),
        ({"result": ""}, "must have a recorded result"),
        ({"status": "partial"}, "must have a note"),
        ({"status": "not recorded", "note": "n"}, "must have no result"),
        ({"run": "absent"}, "there is no command 'absent'"),
        ({"run": "enfold train RUN absent"}, "there is no command"),
        ({"run": "enfold run absent.yaml RUN"}, "there is no command"),
        ({"run": "enfold.absent"}, "there is no command"),
    ],
    ids=str,
)
def test_what_does_not_exist_is_found(tmp_path, changes, problem):
    (found,) = check_items(written(tmp_path, **changes))
    assert problem in found


@pytest.mark.parametrize("command", ["enfold merge RUN perm_avg --set inverse=none", "enfold.fit_weights", "landscape"])
def test_commands_that_exist_are_accepted(tmp_path, command):
    assert not list(check_items(written(tmp_path, run=command)))


def test_the_table_counts_items_and_links_files():
    table = items_table()
    total = next(line for line in table.splitlines() if line.startswith("| all |"))
    assert next(int(cell) for cell in total.split("|")[2:-1]) == 113
    for line in table.splitlines():
        for target in (part.split(")")[0] for part in line.split("](../")[1:]):
            assert (ROOT / target).exists()
