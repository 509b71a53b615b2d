"""What every test of the core may use beside the fixtures that the wheel ships."""

import pytest
from kvdock.device import DeviceInfo


@pytest.fixture
def cpu_device():
    """A profile of 1 GiB, all of it free."""
    return DeviceInfo(
        device_type="cpu", name="small", total_bytes=2**30, free_before_load_bytes=2**30, free_bytes=2**30
    )
