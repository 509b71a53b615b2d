"""Random writes, moves and copies against plain dictionaries."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvdock.pools import MHAPool, MLAPool  # noqa: E402

SLOTS = st.integers(1, 15)
MANY = st.lists(SLOTS, min_size=0, max_size=8, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([2, 5]), MANY),
        st.tuples(st.just("move"), MANY, MANY),
        st.tuples(st.just("swap out and in"), MANY, MANY),
    ),
    max_size=12,
)


class Model:
    """What each layer and slot must hold: the number of the write that came last."""

    def __init__(self, pool, shapes):
        self.pool = pool
        self.shapes = shapes
        self.held = {(layer, slot): 0 for layer in (2, 5) for slot in range(16)}
        self.writes = 0

    def apply(self, step):
        kind, first, second = step
        if kind == "write":
            self.write(first, second)
        elif kind == "move":
            self.move(first[: len(second)], second[: len(first)])
        else:
            self.swap(first[: len(second)], second[: len(first)])

    def write(self, layer, slots):
        numbers = [self.writes + i for i in range(1, len(slots) + 1)]
        self.writes += len(slots)
        k, v = (
            torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1).expand(-1, *shape).clone()
            for shape in self.shapes
        )
        self.pool.set_kv_buffer(layer, torch.tensor(slots, dtype=torch.int32), k, v)
        self.held.update({(layer, slot): number for slot, number in zip(slots, numbers, strict=True)})

    def move(self, targets, sources):
        self.pool.move_kv_cache(*(torch.tensor(s, dtype=torch.int64) for s in (targets, sources)))
        self._copied(targets, dict(self.held), sources)

    def swap(self, sources, targets):
        copies = self.pool.get_cpu_copy(torch.tensor(sources, dtype=torch.int64))
        before = dict(self.held)
        self.write(2, sources)
        self.pool.load_cpu_copy(copies, torch.tensor(targets, dtype=torch.int64))
        self._copied(targets, before, sources)

    def _copied(self, targets, before, sources):
        for layer in (2, 5):
            for target, source in zip(targets, sources, strict=True):
                self.held[layer, target] = before[layer, source]

    def check(self):
        for layer in (2, 5):
            for view in self.pool.get_kv_buffer(layer):
                found = view.flatten(0, 1).flatten(1).to(torch.float32)
                expected = torch.tensor([self.held[layer, slot] for slot in range(1, 16)], dtype=torch.float32)
                assert found[1:16].eq(expected[:, None]).all()


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize(("cls", "dtype"), [(MHAPool, "float32"), (MHAPool, "bfloat16"), (MLAPool, "float16")])
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_reads_agree_with_a_dictionary(make, cls, dtype, page_size, steps):
    layer = make.mha(heads=2, dim=4, v_dim=2) if cls is MHAPool else make.mla(lora=4, rope=2)
    pool = make.pool(
        cls, make.query({2: layer, 5: layer}, page_size, dtype=dtype), tokens=-(-15 // page_size) * page_size
    )
    model = Model(pool, [(2, 4), (2, 2)] if cls is MHAPool else [(1, 6), (1, 4)])
    for step in steps:
        model.apply(step)
    model.check()


@settings(max_examples=25, deadline=None)
@given(data=st.binary(min_size=256, max_size=256))
def test_8_bit_slots_move_and_copy_bit_for_bit(make, data):
    pool = make.pool(MHAPool, make.query({0: make.mha(heads=1)}, page_size=1, dtype="fp8"), tokens=64)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(32, 1, 8)
    first, second, third = (torch.arange(start, start + 32) for start in (1, 33, 17))
    pool.set_kv_buffer(0, first, rows, rows)
    copies = pool.get_cpu_copy(first)
    pool.move_kv_cache(second, first)
    pool.load_cpu_copy(copies, third)
    read = pool.get_key_buffer(0).view(torch.uint8)
    assert read[17:49, 0].equal(rows)
    assert read[49:65, 0].equal(rows[16:])
