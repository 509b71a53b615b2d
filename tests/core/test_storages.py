"""How buffers share memory, in numbers worked out by hand."""

import pytest
from kvdock.errors import PlanError
from kvdock.layout import Buffer, SizeRule, Space, Unit
from kvdock.storages import block_nbytes, bytes_of, fits_pages, lay_pages

FULL = Space(name="full", rule=SizeRule(), page_size=4)
SPACES = {"full": FULL, "swa": Space(name="swa", rule=SizeRule(), page_size=4)}


def buffer(name="k", **fields):
    given = {"role": "key", "shape": (3,), "dtype": "bfloat16", "space": "full", "guard": 4, "layers": (0, 2)}
    return Buffer(name=name, **{**given, **fields})


def test_a_page_holds_layer_after_layer_its_blocks_on_16_bytes():
    keys, values = buffer(storage="pages"), buffer("v", shape=(5,), storage="pages")
    # 4 rows of 6 bytes are 24, aligned 32; 4 rows of 10 are 40, aligned 48
    layout = lay_pages([keys, values], FULL, 8)
    assert [(b.buffer, b.layer_id, b.offset, b.nbytes) for b in layout.blocks] == [
        ("k", 0, 0, 32),
        ("v", 0, 32, 48),
        ("k", 2, 80, 32),
        ("v", 2, 112, 48),
    ]
    assert (layout.page_nbytes, layout.pages, layout.nbytes) == (160, 3, 480)


def test_buffers_of_some_layers_and_of_none_come_where_they_belong():
    every, some = (
        buffer(layers=(0, 1, 2)),
        buffer("i", layers=(1,), unit=Unit.PAGE, guard=1, shape=(40,), dtype="uint8"),
    )
    whole = buffer("w", layers=())
    layout = lay_pages([every, some, whole], FULL, 4)
    assert [(b.buffer, b.layer_id) for b in layout.blocks] == [("k", 0), ("k", 1), ("i", 1), ("k", 2), ("w", None)]
    assert block_nbytes(some, 4) == 48  # one row of 40 bytes a page


def test_bytes_in_pages_add_up_to_the_byte_buffer_and_its_rounding():
    pair = [buffer(storage="pages", owner="g"), buffer("v", shape=(5,), storage="pages", owner="g")]
    assert bytes_of(pair, SPACES, {"full": 8}) == [3 * 2 * 32, 3 * 2 * 48]
    assert bytes_of(pair, SPACES, {"full": 8}, 512) == [3 * 2 * 32 + 32, 3 * 2 * 48]  # 480 bytes, up to 512


def test_byte_buffers_of_two_owners_are_two():
    pair = [buffer(storage="pages", owner="a"), buffer(storage="pages", owner="b")]
    assert bytes_of(pair, SPACES, {"full": 8}, 256) == [256, 256]


def test_of_buffers_that_lie_over_each_other_the_largest_takes_memory():
    small, large = (buffer(f"w{i}", layers=(), overlay="w", owner=str(i), shape=(i,)) for i in (2, 9))
    apart = buffer("k", owner="k")
    assert bytes_of([small, apart, large], SPACES, {"full": 8}) == [0, 2 * 12 * 6, 12 * 18]
    # which is the largest depends on the sizes
    other = buffer("w9", layers=(), overlay="w", owner="s", space="swa", shape=(9,))
    small = buffer("w2", layers=(), overlay="w", owner="f", shape=(2,))
    assert bytes_of([small, other], SPACES, {"full": 400, "swa": 4}) == [404 * 4, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"guard": 5},
        {"round_rows_to": 8},
        {"base_align": 64},
        {"memory": "host"},
        {"max_tensor_bytes": 2**31},
        {"space": "swa"},
    ],
)
def test_what_needs_a_tensor_of_its_own_does_not_go_into_pages(change):
    assert fits_pages(buffer(), FULL)
    assert not fits_pages(buffer(**change), FULL)


@pytest.mark.parametrize("change", [{"storage": "pages", "layers": ()}, {"layers": (0, 1)}])
def test_an_overlay_is_one_tensor_of_nothing_else(change):
    with pytest.raises(PlanError, match="lies over others as 'w'; give it one tensor of its own"):
        buffer(overlay="w", **change)
