"""The request table: rows, generations, one scatter a batch."""

import threading

import pytest
from kvdock.device import DeviceInfo
from kvdock.errors import BuildError, SlotError
from kvdock.layout import SizeRule, Space
from kvdock.model import LayerSpec, MHAParams, ModelSpec
from kvdock.options import CacheOptions, Parallelism
from kvdock.planned import Parts
from kvdock.queries import RequestQuery

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from kvdock.kernels.reference import ReferenceKernels  # noqa: E402
from kvdock.requests import ReqToTokenPool  # noqa: E402


class StandInTensors:
    def __init__(self, buffers, units, device):
        self._tensors = {
            b.name: torch.zeros(
                (b.rows(units), *b.shape),
                dtype=getattr(torch, b.dtype),
                device="cpu" if b.memory == "host" else device,
            )
            for b in buffers
        }

    def rows(self, name, layer_id=None):
        return self._tensors[name]


def query(columns):
    layer = LayerSpec(kind="mha", params=MHAParams(num_kv_heads=1, head_dim=8, v_head_dim=8))
    return RequestQuery(
        model=ModelSpec(name="m", architecture="M", layers=(layer,), context_length=4096, dtype="bfloat16"),
        options=CacheOptions(),
        parallel=Parallelism(),
        device=DeviceInfo(device_type="cpu", name="cpu", total_bytes=1, free_before_load_bytes=1, free_bytes=1),
        spaces={"requests": Space(name="requests", rule=SizeRule(), issued_by="request_pool")},
        groups=(),
        columns=columns,
    )


def make_pool(size, columns=8, device="cpu", debug=False, planned=None):
    asked = query(columns)
    parts = Parts(
        tensors=StandInTensors(ReqToTokenPool.buffers(asked), planned or size, device),
        kernels=ReferenceKernels(),
        device=torch.device(device),
        sizes={"requests": size},
        debug=debug,
    )
    return ReqToTokenPool(asked, parts)


def slots(*values):
    return torch.tensor(values, dtype=torch.int64)


def test_only_the_table_is_on_the_device():
    declared = {b.name: (b.rows(4), b.shape, b.dtype, b.memory) for b in ReqToTokenPool.buffers(query(100))}
    assert declared == {
        "req_to_token": (5, (100,), "int32", "device"),
        "free_rows": (4, (), "int64", "host"),
        "generation": (5, (), "int64", "host"),
        "lengths": (5, (), "int64", "host"),
    }


def test_rows_start_after_the_padding_row():
    """A-12: row 0 is never handed out, also after clear."""
    pool = make_pool(3)
    for _ in range(2):
        assert pool.alloc(["a", "b", "c"]) == [1, 2, 3]
        assert pool.available_size() == 0
        pool.clear()
    assert pool.available_size() == 3


def test_a_request_keeps_its_row():
    pool = make_pool(3)
    assert pool.alloc(["a"]) == [1]
    assert pool.alloc(["b", "a", "b"]) == [2, 1, 2]
    assert (pool.row_of("a"), pool.row_of("z"), pool.request_of(2), pool.request_of(3)) == (1, None, "b", None)
    assert pool.generation.tolist() == [0, 1, 1, 0]
    pool.check()


def test_an_alloc_that_does_not_fit_changes_nothing():
    pool = make_pool(3)
    pool.alloc(["a", "b"])
    assert pool.alloc(["a", "c", "d"]) is None
    assert (pool.available_size(), pool.row_of("c")) == (1, None)
    assert pool.generation.tolist() == [0, 1, 1, 0]
    assert pool.alloc(["a", "c"]) == [1, 3]


def test_a_freed_row_rests_until_the_others_were_used():
    pool = make_pool(3)
    pool.alloc(["a"])
    pool.free("a")
    assert pool.alloc(["b", "c", "d"]) == [2, 3, 1]
    assert pool.generation.tolist() == [0, 2, 1, 1]
    pool.check()


def test_freeing_an_unknown_request_is_refused():
    pool = make_pool(3)
    pool.alloc(["a"])
    pool.free("a")
    with pytest.raises(SlotError, match="request 'a' has no row"):
        pool.free("a")
    assert pool.available_size() == 3


def test_a_batch_is_written_row_after_row():
    pool = make_pool(3)
    pool.alloc(["a", "b", "c"])
    pool.write([2, 1, 3], [0, 3, 2], [3, 5, 2], slots(10, 11, 12, 20, 21))
    assert pool.req_to_token.tolist() == [
        [0] * 8,
        [0, 0, 0, 20, 21, 0, 0, 0],
        [10, 11, 12, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert pool.lengths.tolist() == [0, 5, 3, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mean", [63, 64, 300])
def test_long_ranges_are_written_as_short_ones_are(mean, dtype):
    """Ranges of mean − 2, 0 and 2 · mean + 2 columns, where the host copies range by range from 64 on."""
    pool = make_pool(3, columns=700)
    pool.alloc(["a", "b", "c"])
    values = torch.arange(1, 3 * mean + 1, dtype=dtype)
    pool.write([3, 1, 2], [4, 9, 700 - 2 * mean - 2], [mean + 2, 9, 700], values)
    assert pool.req_to_token[3, 4 : mean + 2].tolist() == list(range(1, mean - 1))
    assert pool.req_to_token[2, 700 - 2 * mean - 2 :].tolist() == list(range(mean - 1, 3 * mean + 1))
    assert int(pool.req_to_token.count_nonzero()) == 3 * mean
    assert pool.lengths.tolist() == [0, 9, 700, mean + 2]


def test_one_row_is_written_up_to_the_last_column():
    pool = make_pool(2)
    pool.alloc(["a"])
    pool.write([1], [5], [8], slots(7, 8, 9))
    assert pool.req_to_token[1].tolist() == [0, 0, 0, 0, 0, 7, 8, 9]
    pool.write([1], [0], [2], slots(1, 2))
    assert pool.lengths.tolist() == [0, 8, 0]
    pool.write([], [], [], slots())
    assert pool.req_to_token[1].tolist() == [1, 2, 0, 0, 0, 7, 8, 9]


def test_a_new_owner_starts_at_length_zero():
    pool = make_pool(1)
    pool.alloc(["a"])
    pool.write([1], [0], [4], slots(1, 2, 3, 4))
    pool.free("a")
    pool.alloc(["b"])
    assert pool.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rows", "starts", "ends", "message"),
    [
        ([1, 2], [0, 6], [2, 9], "columns 6 … 9 is no range of a table of 4 rows and 8 columns"),
        ([1, 2], [0, -1], [2, 2], "columns -1 … 2"),
        ([1, 4], [0, 0], [2, 3], "row 4"),
        ([1, 3], [0, 0], [2, 3], "row 3 of the request table belongs to no request"),
        ([1, 0], [0, 0], [2, 3], "row 0 of the request table belongs to no request"),
        ([1, 2], [0, 0], [2, 2], "5 slots for 4 columns"),
        ([1], [0, 0], [2, 3], "1 rows, 2 starts and 2 ends"),
    ],
)
def test_a_write_that_does_not_fit_writes_nothing(rows, starts, ends, message):
    pool = make_pool(3)
    pool.alloc(["a", "b"])
    with pytest.raises(SlotError, match=message):
        pool.write(rows, starts, ends, slots(1, 2, 3, 4, 5))
    assert int(pool.req_to_token.abs().sum()) == 0
    assert pool.lengths.tolist() == [0, 0, 0, 0]


def test_writes_never_wait():
    pool = make_pool(3, device="meta")
    pool.alloc(["a", "b"])
    pool.write([1, 2], [0, 4], [3, 6], slots(1, 2, 3, 4, 5).to("meta"))
    pool.write([1], [3], [5], slots(6, 7).to("meta"))
    assert pool.lengths.tolist() == [0, 5, 6, 0]


def test_a_table_of_another_size_is_refused():
    """A-17."""
    with pytest.raises(BuildError, match="5 rows for 8 requests and one padding row"):
        make_pool(8, planned=4)


def test_debug_refuses_another_thread():
    pool = make_pool(2, debug=True)
    pool.alloc(["a"])
    caught = []

    def call():
        try:
            pool.free("a")
        except SlotError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "the request pool is owned by thread" in caught[0]
    assert pool.row_of("a") == 1


def test_check_names_rows_that_do_not_add_up():
    pool = make_pool(3)
    pool.alloc(["a"])
    free = pool.parts.tensors.rows("free_rows")
    free[1] = 1
    with pytest.raises(SlotError, match=r"rows \[1\] of the request table are free twice, or free and held"):
        pool.check()
    free[1] = 3
    with pytest.raises(SlotError, match=r"rows \[3\] .* free twice"):
        pool.check()
    free[1] = 9
    with pytest.raises(SlotError, match=r"rows \[2\] of the request table are lost"):
        pool.check()


def test_random_traces_keep_rows_apart():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 6), max_size=5)), max_size=20))
    def trace(operations):
        pool, held = make_pool(4), {}
        for allocates, names in operations:
            if allocates:
                rows = pool.alloc(names)
                fits = len(held.keys() | set(names)) <= 4
                assert (rows is not None) == fits
                if rows is not None:
                    assert all(held.get(name, row) == row for name, row in zip(names, rows, strict=True))
                    held.update(zip(names, rows, strict=True))
            else:
                for name in held.keys() & set(names):
                    pool.free(name)
                    del held[name]
            assert len(set(held.values())) == len(held) == 4 - pool.available_size()
            assert 0 not in held.values()
            pool.check()

    trace()


def test_truncate_forgets_what_was_rolled_back():
    pool = make_pool(3)
    rows = pool.alloc(["a", "b"])
    pool.write(rows, [0, 0], [5, 3], torch.arange(8))
    pool.truncate(["a", "b"], [2, 3])
    assert pool.lengths.tolist() == [0, 2, 3, 0]
    assert pool.req_to_token[1, :5].tolist() == [0, 1, 2, 3, 4]
    pool.write([1], [2], [4], torch.arange(2))
    assert pool.lengths.tolist() == [0, 4, 3, 0]
    assert pool.live_rows() == {1: "a", 2: "b"}


@pytest.mark.parametrize(
    ("requests", "lengths", "message"),
    [
        (["a", "c"], [1, 1], "request 'c' has no row, so it cannot go back to 1"),
        (["b", "a"], [0, 6], "request 'a' wrote 5 tokens, so it cannot go back to 6"),
        (["b", "a"], [0, -1], "request 'a' wrote 5 tokens, so it cannot go back to -1"),
        (["a", "a"], [1, 2], "request 'a' is named twice"),
        (["b", "a"], [0], "2 requests but 1 lengths"),
        (["a"], [1.5], r"lengths holds \[1.5\], which are no whole numbers"),
    ],
)
def test_a_truncate_that_makes_no_sense_changes_nothing(requests, lengths, message):
    pool = make_pool(3)
    pool.write(pool.alloc(["a", "b"]), [0, 0], [5, 3], torch.arange(8))
    with pytest.raises(SlotError, match=message):
        pool.truncate(requests, lengths)
    assert pool.lengths.tolist() == [0, 5, 3, 0]


def test_debug_refuses_to_be_read_from_another_thread():
    pool = make_pool(2, debug=True)
    pool.alloc(["a"])
    caught = []

    def call():
        for read in (lambda: pool.row_of("a"), pool.available_size, pool.check):
            try:
                read()
            except SlotError as error:
                caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 3


def test_rows_of_a_batch_are_written_in_one_call(monkeypatch):
    calls = []
    write_spans = ReferenceKernels.write_spans

    def counted(kernels, table, rows, starts, ends, slots):
        calls.append(len(rows))
        write_spans(kernels, table, rows, starts, ends, slots)

    monkeypatch.setattr(ReferenceKernels, "write_spans", counted)
    pool = make_pool(3)
    rows = pool.alloc(["a", "b", "c"])
    pool.write(rows, [0, 0, 0], [2, 1, 3], slots(5, 6, 7, 8, 9, 10))
    assert calls == [3]
    assert pool.req_to_token[1:, :3].tolist() == [[5, 6, 0], [7, 0, 0], [8, 9, 10]]
