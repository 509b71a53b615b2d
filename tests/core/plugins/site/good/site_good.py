from kvdock import DeviceInfo, hookimpl

kvdock_contract = "0.1"


@hookimpl
def device_catalogue():
    return {
        "good-1": DeviceInfo(
            device_type="good",
            name="good-1",
            total_bytes=2**30,
            free_before_load_bytes=2**30,
            free_bytes=2**30,
            source="made up",
        )
    }
