"""What tests of the trainer share."""

import pytest

from unit_tests.orchestration.ranks.ranks import Ranks


@pytest.fixture(scope="session")
def rank_groups():
    """One trainer rank, and two, ready to work: {1: Ranks, 2: Ranks}."""
    groups = {count: Ranks(count) for count in (1, 2)}
    yield groups
    for group in groups.values():
        group.close()
