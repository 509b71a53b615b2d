import kvdock
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
    with pytest.raises(PlanError, match="option page_size=True does not fit: give a whole number"):
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


@pytest.mark.parametrize("make", [make_options, lambda values: CacheOptions(**values)], ids=["names", "struct"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", 8.5, "option page_size=8.5 does not fit: give a whole number"),
        ("page_size", "8", "option page_size='8' does not fit: give a whole number"),
        ("mem_fraction_static", True, "mem_fraction_static=True does not fit: give a number"),
        ("swa_full_tokens_ratio", "1", "swa_full_tokens_ratio='1' does not fit: give a number"),
        ("hybrid_swa", "of", "hybrid_swa='of' does not fit: give one of 'auto', 'on', 'off'; did you mean 'off'"),
        ("role", "Decode", "role='Decode' does not fit: give one of .*; did you mean 'decode'"),
        ("prefix_cache", "no", "prefix_cache='no' does not fit: give true or false"),
        ("kv_cache_dtype", 5, "kv_cache_dtype=5 does not fit: give text"),
        ("plugins", "cuda", "plugins='cuda' does not fit: give a list of texts"),
        ("plugins", ["cuda", 5], r"plugins=\['cuda', 5\] does not fit: give a list of texts"),
        ("draft", 5, "draft=5 does not fit: give text or names and values"),
        ("plugin_options", {"acme": 5}, "plugin_options={'acme': 5} does not fit: give names and values"),
        ("speculative_algorithm", 5, "speculative_algorithm=5 does not fit: give text"),
        ("speculative_algorithm", "EAGEL", "'EAGEL' is not known; give one of EAGLE, .*; did you mean 'EAGLE'"),
        ("speculative_num_steps", 2**20 + 1, "speculative_num_steps=1048577 is outside 1 … 1048576"),
        ("speculative_topk", 2**62, "speculative_topk=4611686018427387904 is outside 1 … 1048576"),
    ],
)
def test_an_option_of_another_type_is_refused_however_it_is_given(make, name, value, message):
    with pytest.raises(PlanError, match=message):
        make({name: value})


def test_a_struct_holds_what_names_and_values_would_make():
    given = {"page_size": 8.0, "plugins": ["acme"], "mem_fraction_static": 1, "speculative_algorithm": "eagle3"}
    assert CacheOptions(**given) == make_options(given)
    options = CacheOptions(**given)
    assert (options.plugins, options.speculative_algorithm) == (("acme",), "EAGLE3")
    assert (type(options.page_size), type(options.mem_fraction_static)) == (int, float)
    assert Parallelism(pp_size=2, pp_layers=[30, 31]).pp_layers == (30, 31)


def test_options_of_a_plugin_are_not_shared_with_the_caller():
    own = {"acme": {"fast": True}}
    options = CacheOptions(plugin_options=own)
    own["acme"]["fast"] = False
    assert options.plugin_options == {"acme": {"fast": True}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (5, "options=5 do not fit: give a CacheOptions, or names and values"),
        (0, "options=0 do not fit"),
        ({1: 2}, "no option is called 1"),
    ],
)
def test_options_that_are_no_names_and_values_are_refused(values, message):
    with pytest.raises(PlanError, match=message):
        make_options(values)


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": 5}, "device=5 does not fit: give a name such as 'h200'"),
        ({"budget_bytes": "abc"}, "budget_bytes='abc' does not fit: give a whole number"),
        ({"budget_bytes": True}, "budget_bytes=True does not fit"),
        ({"budget_bytes": -1}, r"budget_bytes=-1 is no number of bytes; give a whole number from 0 to 2\^63 - 1"),
        ({"budget_bytes": 2**63}, "budget_bytes=9223372036854775808 is no number of bytes"),
        ({"device": "cpu", "weights_bytes": 1.5}, "weights_bytes=1.5 does not fit"),
        ({"budget_bytes": 2**20, "options": 5}, "options=5 do not fit"),
        ({"budget_bytes": 2**20, "options": {1: 2}}, "no option is called 1"),
        ({"budget_bytes": 2**20, "parallel": 5}, "parallel sizes=5 do not fit: give a Parallelism"),
        ({"budget_bytes": 2**20, "registry": 5}, "registry=5 does not fit: give a Registry"),
        ({"budget_bytes": Unshowable()}, "budget_bytes=a Unshowable that cannot be shown does not fit"),
    ],
)
def test_arguments_of_a_plan_are_refused_by_name(arguments, message):
    with pytest.raises(PlanError, match=message):
        kvdock.plan(MODEL, **arguments)


def test_a_draft_that_would_not_be_read_is_refused():
    options = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4, "draft": MODEL}
    with pytest.raises(
        PlanError, match=r"speculative_algorithm='NGRAM' drafts without a model, so draft=.* leave draft"
    ):
        kvdock.plan(MODEL, budget_bytes=2**20, options=options)


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
        ({"dp_attention": "no"}, "parallel size dp_attention='no' does not fit: give true or false"),
        ({"pp_size": 2, "pp_rank": 1.5}, "pp_rank=1.5 does not fit: give a whole number"),
        ({"pp_size": 2, "pp_layers": (1.5, 30.5)}, r"pp_layers=\(1.5, 30.5\) does not fit: give a list of whole"),
        ({"tp": 8}, "no parallel size is called 'tp'; did you mean"),
    ],
)
def test_parallel_sizes_that_make_no_sense_are_refused(values, message):
    with pytest.raises(PlanError, match=message):
        make_parallelism(values)


def test_ranks_and_flags_are_checked_in_a_struct_too():
    with pytest.raises(PlanError, match="dp_attention='no' does not fit"):
        Parallelism(dp_attention="no")
    assert Parallelism(pp_size=2, pp_rank=1.0) == Parallelism(pp_size=2, pp_rank=1)


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
