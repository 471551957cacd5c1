"""A plugin of pytest for kit/mutate.py: the processor seconds that the collection and each test take.

    pytest -p processor_times --processor-times FILE tests/buffer

Processes that a test starts and waits for are included. Each line of the file is the seconds, a tab, and the test's
id; the first line has no id and is what comes before the first test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

#: Where the lines go.
FILE = pytest.StashKey[Path]()


def used() -> float:
    """The processor seconds of this process, and of those that it waited for."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-times", required=True, type=Path, help="the file to write")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FILE] = config.getoption("--processor-times").resolve()  # a test may change the working directory


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[FILE].write_text(f"{used()}\t\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = used()
    result: Any = yield
    with item.config.stash[FILE].open("a") as file:
        file.write(f"{used() - before}\t{item.nodeid}\n")
    return result
