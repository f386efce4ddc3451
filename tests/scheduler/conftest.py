"""Constants of the model in the tests of this folder."""

from collections.abc import Iterator

import pytest

from presage.scheduler.model import predict

CONSTANTS = {
    "MULTIPLICATION_SEC": 1e-8,
    "SERIAL_SEC": 2.8e-6,
    "SERIAL_FEATURE_SEC": 0.0,
    "STEP_SEC": 3.5e-4,
    "MESSAGE_SEC": 3e-4,
    "EXCHANGE_SEC": 0.0,
    "STORE_SEC": 8e-7,
    "BUILD_SEC": 4.0,
    "BUILD_FEATURE_SEC": 0.0,
    "ROW_SEC": 5.3e-5,
    "ROW_FEATURE_SEC": 2.8e-7,
}
"""A slow machine with a fast network: pools of many processes are worth their price, whatever the
machine does on which the defaults were measured."""


@pytest.fixture(scope="module", autouse=True)
def slow_machine() -> Iterator[None]:
    """Use these constants in the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CONSTANTS.items():
            patch.setattr(predict, name, value)
        yield
