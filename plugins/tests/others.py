"""Devices of other vendors, for the tests of several plugins."""

import kvdock


def cuda_device(*capabilities):
    """Return a device that torch calls ``cuda`` and that is another vendor's: other builds of torch use the name too."""
    return kvdock.DeviceInfo(
        device_type="cuda",
        name="another vendor's",
        total_bytes=2**30,
        free_before_load_bytes=2**30,
        free_bytes=2**30,
        capabilities=capabilities,
    )
