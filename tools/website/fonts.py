"""The font of the equations: a part of STIX Two Math (SIL Open Font License), which ziamath ships."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import ziamath
from fontTools import subset
from fontTools.ttLib import TTFont

FILE = "docs/fonts/STIXTwoMath-subset.ttf"
RANGES = (
    *((0x20, 0x7F), (0xA0, 0x100), (0x300, 0x370), (0x391, 0x3D7), (0x2010, 0x2058)),  # letters, accents, punctuation
    *((0x2190, 0x2200), (0x2200, 0x2300), (0x2308, 0x2330), (0x27E6, 0x27F0)),  # arrows, operators, brackets
    *(
        (0x2070, 0x20A0),
        (0x2100, 0x2150),
        (0x1D434, 0x1D468),
        (0x1D6E2, 0x1D71C),
    ),  # raised letters, italics of formulas
)


@cache
def math_font() -> bytes:
    """Return the font, with its table of mathematical constants."""
    font = TTFont(Path(ziamath.__file__).parent / "fonts" / "STIXTwoMath-Regular.ttf")
    options = subset.Options()
    options.layout_features = ["ssty", "mark", "mkmk", "ccmp"]
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[each for start, end in RANGES for each in range(start, end)])
    subsetter.subset(font)
    found = io.BytesIO()
    font.save(found)
    return found.getvalue()
