"""The command line of the studies, called in this process."""

from dataclasses import dataclass

import pytest

from studies.__main__ import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def studies(capsys: pytest.CaptureFixture[str]):
    """Run `python -m studies` and return its exit code and what it printed."""

    def call(*arguments: object) -> Outcome:
        code = main([str(each) for each in arguments])
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err)

    return call
