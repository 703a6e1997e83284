"""What the tests of the checks share."""

from collections.abc import Iterator

import pytest

from tests.stand_ins.scaled_mm import installed_where_missing


@pytest.fixture(scope="session", autouse=True)
def _fp8_on_every_cpu() -> Iterator[None]:
    with installed_where_missing():
        yield
