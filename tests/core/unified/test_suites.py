"""The conformance suite that vendors run, where nobody else takes of the buffer; the state machine has both sides."""

from typing import ClassVar

from kvdock.device import DeviceInfo
from kvdock.model import ConvBlock, ConvParams, LayerSpec, MHAParams, ModelSpec, StateParams
from kvdock.testing.suites import AllocatorSuite, unsupported
from kvdock.unified import UnifiedAllocator

CPU = DeviceInfo(device_type="cpu", name="cpu", total_bytes=2**24, free_before_load_bytes=2**24, free_bytes=2**24)
HEADS = MHAParams(num_kv_heads=2, head_dim=8, v_head_dim=8)
CONV = ConvParams(blocks=(ConvBlock(heads=1, head_dim=16),), kernel=3)
STATE = StateParams(conv=(CONV,), temporal=(2, 8, 4), temporal_dtype="float32")


def make_model(*layers):
    return ModelSpec(name="m", architecture="A", layers=layers, context_length=256, dtype="bfloat16")


class TestUnifiedAllocator(AllocatorSuite):
    device = CPU
    allocator_cls = UnifiedAllocator
    model = make_model(LayerSpec(kind="mha", params=HEADS), LayerSpec(kind="state", params=STATE))
    options: ClassVar = {"unified_memory": True}
    page_sizes = (1, 16)
    test_everything_is_free_at_first = unsupported("a plan of unified memory counts the tokens beside the states")
    test_what_is_undone_never_happened = unsupported("places come back in a block of UnifiedMemory.whole alone")
