"""Fixtures for all tests."""

import pytest


@pytest.fixture(scope="module", params=["kernel", "reference"])
def body(request):
    """The operators' bodies that run on a CPU, one after the other."""
    from ms_varlen.ops.body import use_body  # imports MindSpore, which many tests do without

    use_body(request.param)
    yield request.param
    use_body(None)
