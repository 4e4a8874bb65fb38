"""The report page: its content, its conditions, and escaping of user text."""

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from enfold.errors import EnfoldError
from enfold.metrics import auroc
from enfold.report import uncertainty_blocks
from enfold.report.card import render_card
from enfold.report.content import Content, Difference
from enfold.report.figure import write_figure
from enfold.report.page import render_page, to_json
from enfold.report.sections import listed_blocks
from enfold.report.svg import inline_svg
from enfold.report.uncertainty_blocks import METRICS
from enfold.run.collect import collect

pytestmark = pytest.mark.usefixtures("drawn_once")

EVIL = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&amp;"


@pytest.fixture(scope="module")
def content(stored_run: Path) -> Content:
    return collect(stored_run)


@pytest.fixture
def shown(content: Content, drawn_once: None) -> str:
    return render_page([content])


class Outline(HTMLParser):
    """Every element with its attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._quiet = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._quiet = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._quiet = False

    def handle_data(self, data):
        if not self._quiet:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _sections(text: str) -> list[str]:
    return [own["id"] for tag, own in Outline(text).elements if tag == "section" and "id" in own]


def test_headline_names_network_gain_cost_and_control(content: Content, shown: str) -> None:
    gains = {name: content.rows[name]["gain_recovered"]["mean"] for name in ("kd", "control")}
    text = Outline(shown).text
    assert f"One network, kd, recovers {100 * gains['kd']:.0f} ±" in text
    assert "at 1.00× the FLOPs of a single network" in text
    assert f"its control recovers {100 * gains['control']:.0f} ±".replace("-", "−") in text
    assert "the ensemble needs 3.00×" in text
    assert "selected from 2 models by NLL on validation data" in text


def test_sections_come_in_their_order_and_the_plane_of_quality_and_cost_first(shown: str) -> None:
    assert _sections(shown) == ["quality-cost", "models", "calibration", "coverage", "curves", "examples", "record"]
    assert shown.index("NLL against FLOPs.</b>") == shown.index("<figcaption><b>") + len("<figcaption><b>")


def test_every_model_has_a_row_with_spread_and_interval(content: Content, shown: str) -> None:
    for name in ("mean member", "ensemble", "ensemble of 2", "control", "average", "kd"):
        assert f'<th scope="row">{name}</th>' in shown
    nll = content.rows["kd"]["scores"]["nll"]
    assert f"{nll['mean']:.4f} <small>± {nll['std']:.4f}</small>" in shown
    shift = content.differences["kd"]["nll"]
    assert f"{shift.mean:+.4f} <small>[{shift.lower:+.4f}, {shift.upper:+.4f}]".replace("-", "−") in shown.replace(
        "-", "−"
    )


@pytest.mark.parametrize(
    ("change", "gone"),
    [
        ({"examples": None}, "examples"),
        ({"trainings": ()}, "curves"),
        ({"uncertainty": None}, "calibration"),
        ({"uncertainty": None}, "coverage"),
        ({"summary": {"rows": {}, "seeds": [], "recipe": {}}, "headline": None, "examples": None}, "models"),
    ],
)
def test_sections_need_results(content: Content, shown: str, change, gone: str) -> None:
    assert gone in _sections(shown)
    assert gone not in _sections(render_page([dataclasses.replace(content, **change)]))


def test_every_figure_has_a_caption_and_alt_text(shown: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", shown, re.S)
    assert len(figures) == 7
    for figure in figures:
        assert re.search(r'<svg[^>]*role="img"[^>]*aria-label="[^"]{20,}"', figure)
        assert len(re.search(r"<figcaption>(.*?)</figcaption>", figure, re.S)[1]) > 40
    pictures = [own for tag, own in Outline(shown).elements if tag == "img"]
    assert len(pictures) == 12
    assert all(own["alt"] and own["src"].startswith("data:image/png;base64,") for own in pictures)


def test_the_page_loads_no_external_resources(shown: str) -> None:
    for tag, own in Outline(shown).elements:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert not own.get(name) or own[name].startswith(("#", "data:")), (tag, own)
    assert "default-src 'none'" in html.unescape(shown)
    assert "@import" not in shown


def test_ids_are_used_once(shown: str) -> None:
    ids = [own["id"] for _, own in Outline(shown).elements if "id" in own]
    assert len(ids) == len(set(ids)) > 5


def test_user_text_is_never_code(content: Content) -> None:
    names = (EVIL, *content.examples.names[1:], "b", "c", "d")[:4]
    rows = {f"x{EVIL}" if name == "average" else name: row for name, row in content.rows.items()}
    rows["kd"] = {**rows["kd"], "warning": EVIL}
    evil = dataclasses.replace(
        content,
        name=EVIL,
        recipe=EVIL,
        versions={"enfold": EVIL},
        summary={**content.summary, "rows": rows},
        examples=dataclasses.replace(content.examples, names=names, notice=EVIL),
    )
    shown = render_page([evil, content])
    outline = Outline(shown)
    assert [own for tag, own in outline.elements if tag == "script"] == [
        {"type": "application/json", "id": "results"},
        {},
    ]
    assert not [own for _, own in outline.elements if any(name.startswith("on") for name in own)]
    assert not [own for tag, own in outline.elements if tag == "img" and own["src"] == "x"]
    assert outline.text.count(EVIL) >= 4, "they are shown as they are"
    embedded = re.search(r'<script type="application/json" id="results">(.*?)</script>', shown, re.S)[1]
    assert EVIL in json.loads(embedded)


def test_json_is_valid() -> None:
    assert to_json({"a": [float("nan"), float("inf"), 1.0], 2: None}) == {"a": [None, None, 1.0], "2": None}


def test_several_runs_are_side_by_side(content: Content) -> None:
    other = dataclasses.replace(content, name="another", examples=None)
    shown = render_page([content, other])
    text = Outline(shown).text
    assert shown.count('<section class="headline">') == 2
    assert shown.count('<table class="sortable">') == 1
    assert shown.count('<th scope="row">kd</th>') == 2
    assert "<h3>another</h3>" in shown
    assert "model run accuracy (%)" in text


def test_runs_with_one_name_are_distinguished(content: Content, tmp_path: Path) -> None:
    other = dataclasses.replace(content, folder=tmp_path / "later", examples=None)
    shown = render_page([content, other])
    results = json.loads(re.search(r'id="results">(.*?)</script>', shown, re.S)[1])
    assert list(results) == [f"small ({content.folder})", f"small ({tmp_path / 'later'})"]
    assert f"<h3>small ({tmp_path / 'later'})</h3>" in shown
    with pytest.raises(EnfoldError, match=r"shows each run once, got .* 2 times"):
        render_page([content, content])


def test_a_run_without_evaluation_has_a_note(own_run: Path) -> None:
    (own_run / "summary.json").unlink()
    (own_run / "results.json").unlink()
    shown = render_page([collect(own_run)])
    assert "No results yet" in shown
    assert _sections(shown) == ["curves", "record"]


def test_a_run_that_grows_shows_the_seeds_it_has(tmp_path: Path, stored_run: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(stored_run, copy)
    (copy / "summary.json").unlink()
    (copy / "seed-1/results.json").unlink()
    found = collect(copy)
    assert found.summary["seeds"] == [0]
    assert found.rows["kd"]["scores"]["nll"]["std"] is None
    assert "One seed" in render_page([found])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("summary.json", '{"seeds": [0], "rows": {"kd": {"scores": {}}}}'),
        ("recipe.yaml", "members: many"),
        ("run.json", "nothing"),
        ("predictions/kd.safetensors", "damaged"),
        ("members/history.json", "{"),
        ("ood.json", "<"),
    ],
)
def test_a_broken_run_is_an_error_without_a_page(own_run: Path, file: str, text: str) -> None:
    (own_run / file).write_text(text)
    with pytest.raises(EnfoldError, match=r"run/|recipe\.yaml|'.*run'") as told:
        render_page([collect(own_run)])
    assert len(str(told.value).split(". ")) == 1


@pytest.mark.slow
def test_corruptions_and_ood_detection_have_sections(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1, "brier": 0.6}
    kinds = {kind: {"1": scores, "5": {**scores, "accuracy": 0.3}} for kind in ("fog", "snow")}
    labels = ("mean member", "ensemble", "control", "average", "kd")
    (own_run / "corrupted.json").write_text(json.dumps({"spec": {}, "rows": dict.fromkeys(labels, kinds)}))
    (own_run / "ood.json").write_text(json.dumps({"rows": {}}))
    (own_run / "ood").mkdir()
    scores = {"inside/entropy": torch.rand(20), "<noise>/entropy": 1 + torch.rand(20), "<noise>/energy": torch.rand(20)}
    for label in ("ensemble", "kd"):
        save_file(scores, own_run / "ood" / f"{label}.safetensors")
    summary = json.loads((own_run / "summary.json").read_text())
    how = "resized from 6 x 6 to 4 x 4"
    told = {"examples": 20, "adapted": how, "scores": {"entropy": {"auroc": {"mean": 0.875, "std": None}}}}
    for row in ("kd", "ensemble", "mean member"):
        summary["rows"][row]["ood"] = {"<noise>": told}
    (own_run / "summary.json").write_text(json.dumps(summary))
    content = collect(own_run)
    shown = render_page([content])
    assert list(content.uncertainty.ood) == ["<noise>"]
    assert _sections(shown)[4:6] == ["corruptions", "ood"]
    assert shown.count("by severity.</b>") == 2
    assert "Heat map of accuracy for 2 corruptions and 5 models" in shown
    assert '<td data-value="87.5">87.5</td>' in shown
    assert "<b>Test images and &lt;noise&gt;.</b>" in shown
    table = shown[shown.index('id="ood"') : shown.index("<b>Test images and")]
    assert re.findall(r'<tr class="(\w+)">\s*<th scope="row">', table) == ["member", "ensemble", "network"]
    assert "20 images; resized from 6 x 6 to 4 x 4" in table
    card = render_card(content)
    assert "| AUROC by entropy, \\<noise\\> (%) | 87.5 | – | 87.5 | 87.5 |" in card
    assert "other data: only \\<noise\\>" in card
    _are_written_as_files(content, monkeypatch)
    (own_run / "ood/kd.safetensors").write_text("damaged")
    with pytest.raises(EnfoldError, match=r"kd\.safetensors' must contain scores"):
        collect(own_run)


def _are_written_as_files(content: Content, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(make: Callable[[], Any], folder: Path, name: str, purpose: str, alt: str) -> list[Path]:
        if name == "roc-noise":  # the others are drawn for the page
            return write_figure(make, folder, name, purpose, alt)
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.svg").write_text(alt)
        return [folder / f"{name}.svg"]

    monkeypatch.setattr(uncertainty_blocks, "write_figure", write)
    found, folder = content.uncertainty, content.folder / uncertainty_blocks.FOLDER
    written = uncertainty_blocks.draw_uncertainty(content, folder)
    listed = json.loads((folder / "figures.json").read_text())["figures"]
    names = [entry["file"].removesuffix(".svg") for entry in listed]
    assert names[:6] == [f"{kind}-{metric}" for kind in ("corruptions", "severities") for metric in METRICS]
    assert names[6:9] == ["reliability-one-member", "reliability-ensemble", "reliability-kd"]
    assert names[-3:] == ["risk-coverage", "ood-noise", "roc-noise"]
    assert [path.name for path in written[-3:]] == ["roc-noise.svg", "roc-noise.png", "figures.json"]
    for entry in listed:
        assert entry["caption"]
        assert entry["alt"] in html.unescape((folder / entry["file"]).read_text())
    false, true = found.roc["<noise>"]["kd"]
    assert auroc(*found.ood["<noise>"]["kd"]) == pytest.approx(float(torch.trapezoid(true, false)))
    assert listed_blocks(content) == [], "a page draws these figures itself"
    with pytest.raises(EnfoldError, match="need predictions"):
        uncertainty_blocks.draw_uncertainty(dataclasses.replace(content, uncertainty=None, seeds=()), folder)


def test_trainings_in_progress_show_progress_and_time(own_run: Path) -> None:
    (own_run / "steps/kd.json").unlink()
    epochs = json.loads((own_run / "members/history.json").read_text())["epochs"][:2]
    progress = {"history": {"epochs": epochs, "chosen": []}}
    checkpoint = own_run / "steps/kd.checkpoint.safetensors"
    save_file({"a": torch.zeros(1)}, checkpoint, {"progress": json.dumps(progress)})
    content = collect(own_run)
    training = next(each for each in content.trainings if each.stage == "steps/kd")
    assert (training.seconds, training.epochs, training.done, training.seconds_left) == (None, 3, 2, 2.0)
    shown = render_page([content])
    assert "progress" in _sections(shown)
    assert "<td>2 of 3</td>" in shown
    assert "<td>2.0 s</td>" in shown
    assert "Training of steps and controls.</b>" in shown


def test_a_difference_is_significant_if_its_interval_excludes_zero() -> None:
    assert Difference(1.0, 0.1, 2.0).beyond_noise
    assert Difference(-1.0, -2.0, -0.1).beyond_noise
    assert not Difference(0.5, -0.1, 1.0).beyond_noise


def test_examples_are_those_that_differ_most(content: Content, stored_run: Path) -> None:
    seed = content.seeds[0]
    first, second = (seed.predictions[name]["test"].mean().log_probs[0].exp() for name in ("ensemble", "kd"))
    distance = (first - second).abs().sum(-1) / 2
    found = content.examples.examples
    assert [each.index for each in found] == distance.argsort(descending=True)[:12].tolist()
    assert found[0].distance == pytest.approx(float(distance.max()))
    assert found[0].image.shape == (3, 4, 4)
    assert found[0].image.dtype == torch.uint8


def test_listed_figures_are_shown(own_run: Path) -> None:
    folder = own_run / "landscape"
    folder.mkdir()
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="90pt" viewBox="0 0 9 9"><path d="M0 0h9" id="a"/></svg>'
    (folder / "plane.svg").write_text(svg)
    entry = {"file": "plane.svg", "title": "A plane", "caption": "Low is dark.", "alt": "Three minima in a plane"}
    (folder / "figures.json").write_text(json.dumps({"figures": [entry]}))
    shown = render_page([collect(own_run)])
    assert "landscape" in _sections(shown)
    assert 'aria-label="Three minima in a plane"' in shown
    assert "<b>A plane.</b> Low is dark." in shown
    assert "alignment" not in _sections(shown)
    folder.rename(own_run / "alignment")
    shown = render_page([collect(own_run)])
    assert _sections(shown)[-2:] == ["alignment", "record"], "the figures of alignment have a section of their own"
    assert "landscape" not in _sections(shown)


@pytest.mark.parametrize(
    "style",
    [
        r"background:u\72l(http://evil/y)",
        "background:image-set('http://evil/i.png' 1x)",
        "fill:url(http://evil/z)",
        "position:fixed;top:0",
        "width:expression(alert(1))",
    ],
)
def test_styles_of_figures_cannot_load_or_cover_content(style: str) -> None:
    drawn = (
        f"""<svg xmlns="http://www.w3.org/2000/svg"><g style="{style}" transform="translate(1 2) scale(2)"/></svg>"""
    )
    shown = inline_svg(drawn, "alt", "f0-")
    assert "style" not in shown
    assert "translate(1 2) scale(2)" in shown
    kept = inline_svg(drawn.replace(style, "fill: rgb(1, 2, 3); clip-path: url(#a)"), "alt", "f0-")
    assert "url(#f0-a)" in kept
