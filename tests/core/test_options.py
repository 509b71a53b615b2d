import msgspec
import pytest
from kvdock.errors import PlanError
from kvdock.options import DEFAULTS, CacheOptions, Parallelism, exact_ratio, make_options, make_parallelism


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match="no option is called 'page_sizes'; did you mean 'page_size'"):
        make_options({"page_sizes": 16})


def test_null_means_not_given():
    assert make_options({"page_size": None}) == CacheOptions()


def test_whole_floats_are_counts_and_others_are_not():
    assert make_options({"page_size": 8.0}).page_size == 8
    with pytest.raises(PlanError, match=r"float.*page_size|page_size"):
        make_options({"page_size": 8.5})


def test_booleans_are_no_counts():
    with pytest.raises(PlanError, match="page_size"):
        make_options({"page_size": True})
    with pytest.raises(PlanError, match="page_size=True is not a whole number"):
        CacheOptions(page_size=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", 0, "page_size=0 is outside 1 …"),
        ("page_size", -16, "page_size=-16 is outside 1 …"),
        ("page_size", 2**31, "outside 1 … 2147483647"),
        ("max_total_tokens", 0, "max_total_tokens=0"),
        ("max_running_requests", -1, "max_running_requests=-1"),
        ("mem_fraction_static", 0.0, "mem_fraction_static=0.*above 0 and at most 1"),
        ("mem_fraction_static", 1.5, "mem_fraction_static=1.5"),
        ("swa_full_tokens_ratio", 0, "swa_full_tokens_ratio=0"),
        ("swa_full_tokens_ratio", float("nan"), "swa_full_tokens_ratio=nan"),
        ("kv_cache_dtype", "int3", "kv_cache_dtype='int3' is not a data type"),
        ("kv_cache_dtype", "bfloat61", "did you mean 'bfloat16'"),
        ("hybrid_swa", "maybe", "hybrid_swa"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(name, value, message):
    with pytest.raises(PlanError, match=message):
        make_options({name: value})


def test_options_are_json_both_ways():
    options = make_options(
        {"page_size": 16, "plugin_options": {"acme": {"fast": True}}, "prefer": ["get_pool_cls=acme"]}
    )
    text = msgspec.json.encode(options)
    assert msgspec.json.decode(text, type=CacheOptions) == options


def test_every_default_is_an_option_and_valid():
    assert CacheOptions(**DEFAULTS).page_size == 1


def test_a_ratio_is_the_decimal_that_the_user_wrote():
    assert exact_ratio(0.8) == (4, 5)
    assert exact_ratio(0.1) == (1, 10)


@pytest.mark.parametrize(("heads", "tp", "local"), [(8, 1, 8), (8, 8, 1), (2, 4, 1), (8, 16, 1), (8, 4, 2)])
def test_heads_are_split_or_replicated(heads, tp, local):
    # 2 heads over 4 ranks and 8 over 16 are one replicated head each
    assert Parallelism(tp_size=tp).kv_heads_per_rank(heads) == local


def test_heads_that_do_not_split_are_refused_with_a_size_that_works():
    #
    with pytest.raises(PlanError, match=r"6 KV heads do not split over 4 attention ranks.*works is 3"):
        Parallelism(tp_size=4).kv_heads_per_rank(6)


def test_attention_ranks_leave_out_data_and_context_parallel_ranks():
    assert Parallelism(tp_size=8, dp_size=4, dp_attention=True).attn_tp_size == 2
    assert Parallelism(tp_size=8, cp_size=2).attn_tp_size == 4
    assert Parallelism(tp_size=8, dp_size=4).attn_tp_size == 8


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"tp_size": 6, "dp_size": 4, "dp_attention": True}, "tp_size=6 does not divide by dp_size · cp_size = 4"),
        ({"pp_size": 2, "pp_rank": 2}, "pp_rank=2 is no rank of 2"),
        ({"pp_size": 2, "pp_layers": [3]}, "lists 1 stages of pp_size=2"),
        ({"tp": 8}, "no parallel size is called 'tp'; did you mean"),
    ],
)
def test_parallel_sizes_that_make_no_sense_are_refused(values, message):
    with pytest.raises(PlanError, match=message):
        make_parallelism(values)


def test_the_last_stages_take_the_remainder():
    # 61 = 30 + 31
    assert [len(Parallelism(pp_size=2, pp_rank=rank).stage_layers(61)) for rank in (0, 1)] == [30, 31]
    stages = [Parallelism(pp_size=8, pp_rank=rank).stage_layers(61) for rank in range(8)]
    assert [len(stage) for stage in stages] == [7, 7, 7, 8, 8, 8, 8, 8]
    assert [layer for stage in stages for layer in stage] == list(range(61))


def test_a_given_split_wins_and_has_to_add_up():
    assert list(Parallelism(pp_size=2, pp_rank=1, pp_layers=(1, 3)).stage_layers(4)) == [1, 2, 3]
    with pytest.raises(PlanError, match="adds up to 4, but the model has 5 layers"):
        Parallelism(pp_size=2, pp_layers=(1, 3)).stage_layers(5)
    with pytest.raises(PlanError, match="pp_size=8 is more than the model's 4 layers"):
        Parallelism(pp_size=8).stage_layers(4)
