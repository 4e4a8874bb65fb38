"""Code blocks of pages: `<!-- setup ... -->` before them and `<!-- not run: REASON -->` on the line above one.

A setup is Python code that the reader does not see: it makes the small data and networks that stand for the
reader's own.
"""

from __future__ import annotations

import re

SETUP = re.compile(r"^<!-- setup\n(.*?)^-->\n", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"^<!-- not run: (.*?) -->$", re.MULTILINE)


def for_readers(markdown: str) -> str:
    """Return a page without setups, and with the reasons why code was not run."""
    return NOT_RUN.sub(r'<p class="not-run" markdown="span">Not run by the tests: \1.</p>\n', SETUP.sub("", markdown))
