"""Numbers that could only fail later, where no key is named any more."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from configs.blocks.schedule import Failures
from configs.blocks.sync import Sync


@pytest.mark.parametrize(("block", "key", "value"), [(Failures, "stall_seconds", 0.01), (Sync, "bucket_mib", 1e12)])
def test_a_number_out_of_reason_is_refused_by_its_key(block: type, key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=key):
        block(**{key: value})
