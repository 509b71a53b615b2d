"""Asking the other hooks: models, groups, defaults, spaces, objections; every answer is checked, every failure named."""

import msgspec
import pytest
from kvdock import hookimpl
from kvdock.errors import PlanError, PluginError
from kvdock.layout import LayerGroup, SizeRule, Space
from kvdock.options import CacheOptions
from kvdock.plugins import resolve
from kvdock.plugins.loading import Problem, load
from kvdock.plugins.resolve import Answer
from kvdock.queries import GroupQuery, ModelQuery, OptionsQuery, PlanQuery, PoolQuery, StateQuery

CONFIG = ModelQuery(config={"architectures": ["AcmeForCausalLM"], "model_type": "acme"}, name="m")


@pytest.fixture
def options_query(query_fields):
    def make(**given):
        fields = query_fields()
        return OptionsQuery(**{**fields, "options": CacheOptions(**given)})

    return make


@pytest.fixture
def state_query(query_fields):
    return StateQuery(**query_fields(), groups=(), all_groups=())


@pytest.fixture
def plan_query(query_fields):
    return PlanQuery(**query_fields(), groups=(), spaces={})


@pytest.fixture
def group_query(query_fields, make_model):
    spec = make_model()
    return GroupQuery(**query_fields(spec=spec), layers=tuple(enumerate(spec.layers)), target=spec)


def space(name, **rule):
    return Space(name=name, rule=SizeRule(**rule))


def test_hook_read_model_gives_the_model_of_the_most_specific_tier(registry, mock_plugin, make_model):
    mine = make_model(family="acme")
    registry.add(mock_plugin("core", tier="core", reads=make_model()))
    registry.add(mock_plugin("acme", tier="family", reads=mine))
    found, decision = resolve.read_model(registry, CONFIG)
    assert found is mine
    assert (decision.hook, decision.plugin, decision.name) == ("read_model", "acme", "m")
    assert decision.subject == "the config (architecture 'AcmeForCausalLM', model_type 'acme', role target)"
    assert decision.answers == (Answer(plugin="acme", tier="family", outcome="claimed", detail="m"),)


def test_a_family_that_loses_to_a_preference_says_so(registry, mock_plugin, make_model):
    mine, other = make_model(family="a"), make_model(family="b", layers=3)
    registry.add(mock_plugin("a", tier="family", reads=mine))
    registry.add(mock_plugin("b", tier="family", reads=other))
    found, decision = resolve.read_model(registry, CONFIG, prefer=("read_model=b",))
    assert (found, decision.plugin) == (other, "b")
    assert decision.answers == (
        Answer(plugin="a", tier="family", outcome="outranked", detail="m, lost to prefer read_model=b"),
        Answer(plugin="b", tier="family", outcome="claimed", detail="m"),
    )


class Unprintable:
    def __repr__(self):
        raise ValueError("r")


def test_an_answer_whose_repr_raises_is_refused_by_name(registry, mock_plugin):
    registry.add(mock_plugin("fam", tier="family", reads=lambda query: Unprintable()))
    with pytest.raises(PluginError) as caught:
        resolve.read_model(registry, CONFIG)
    assert str(caught.value) == (
        "plugin 'fam' (no distribution): read_model answered <Unprintable whose repr() raises ValueError> "
        "(Unprintable); return a ModelSpec or None"
    )


def test_a_key_whose_repr_raises_is_refused_by_name(registry, mock_plugin, options_query, state_query):
    registry.add(mock_plugin("fam", tier="family", defaults={Unprintable(): 1}, spaces={Unprintable(): 1}))
    shown = "<Unprintable whose repr\\(\\) raises ValueError>"
    with pytest.raises(PluginError, match=f"'fam' .* default for the option {shown}, which does not exist"):
        resolve.option_defaults(registry, options_query())
    with pytest.raises(PluginError, match=rf"'fam' .*: size_state_pools\[{shown}\] answered 1 \(int\)"):
        resolve.spaces(registry, state_query)


def test_an_error_whose_text_raises_is_named_all_the_same(registry, mock_plugin):
    class Mute(Exception):
        def __str__(self):
            raise ValueError("s")

    def fail(query):
        raise Mute

    registry.add(mock_plugin("fam", tier="family", reads=fail))
    with pytest.raises(PluginError, match=r"'fam' .* raised Mute: <Mute whose str\(\) raises ValueError>; report it"):
        resolve.read_model(registry, CONFIG)


def test_an_answer_is_shown_on_one_line(registry, mock_plugin):
    class Forged:
        def __repr__(self):
            return "x\nkvdock: all is well\x1b[2J"

    registry.add(mock_plugin("fam", tier="family", reads=lambda query: Forged()))
    with pytest.raises(PluginError) as caught:
        resolve.read_model(registry, CONFIG)
    assert "answered x\ufffdkvdock: all is well\ufffd[2J (Forged)" in str(caught.value)


def test_the_core_is_not_asked_to_read_what_a_family_reads(registry, mock_plugin, make_model):
    def fail(query):
        raise ValueError("core does not know this config")

    registry.add(mock_plugin("core", tier="core", reads=fail))
    registry.add(mock_plugin("acme", tier="family", reads=make_model()))
    assert resolve.read_model(registry, CONFIG)[1].plugin == "acme"


def test_a_config_that_nobody_reads_is_an_error_with_who_was_asked(registry, mock_plugin):
    registry.add(mock_plugin("core", tier="core", reads=lambda query: None))
    registry.add(mock_plugin("fam", tier="family", reads=lambda query: None))
    with pytest.raises(PlanError) as caught:
        resolve.read_model(registry, CONFIG)
    assert str(caught.value) == (
        "no family reads this config (architecture 'AcmeForCausalLM', model_type 'acme', role target); "
        "asked: fam, core; install the plugin that knows it, or describe the model with a ModelSpec"
    )


def test_a_family_that_failed_to_load_is_named_where_its_config_is_not_read(registry):
    registry.set_aside(
        Problem(name="fam", tier="family", distribution="d", version="1", reason="no module", status="failed")
    )
    with pytest.raises(PlanError, match="asked: nobody; not loaded: fam: no module; install the plugin"):
        resolve.read_model(registry, CONFIG)


def test_two_families_that_read_one_config_are_an_error(registry, mock_plugin, make_model):
    registry.add(mock_plugin("a", tier="family", reads=make_model()), distribution="kvdock-a", version="1.0")
    registry.add(mock_plugin("b", tier="family", reads=make_model()), distribution="kvdock-b", version="2.0")
    with pytest.raises(PluginError) as caught:
        resolve.read_model(registry, CONFIG)
    assert str(caught.value) == (
        "two plugins claim the config (architecture 'AcmeForCausalLM', model_type 'acme', role target):\n"
        "  a   kvdock-a 1.0   kvdock.testing.mocks\n"
        "  b   kvdock-b 2.0   kvdock.testing.mocks\n"
        "Keep one: uninstall the other, or pass --prefer read_model=a or --no-plugin b."
    )
    assert resolve.read_model(registry, CONFIG, prefer=("read_model=b",))[1].plugin == "b"


def test_a_model_that_is_no_model_is_refused(registry, mock_plugin):
    registry.add(mock_plugin("fam", tier="family", reads={"layers": 2}))
    with pytest.raises(
        PluginError, match=r"'fam' .*: read_model answered \{'layers': 2\} \(dict\); return a ModelSpec"
    ):
        resolve.read_model(registry, CONFIG)


def test_a_faulty_config_stays_an_error_of_the_plan(registry, mock_plugin):
    def read(query):
        raise PlanError("head_dim=0 is outside 1 … 2^20")

    registry.add(mock_plugin("fam", tier="family", reads=read), distribution="kvdock-fam", version="1.0")
    with pytest.raises(PlanError) as caught:
        resolve.read_model(registry, CONFIG)
    assert str(caught.value) == ("head_dim=0 is outside 1 … 2^20 (says plugin 'fam', kvdock-fam 1.0, in read_model)")


def test_a_faulty_config_of_the_core_is_said_in_its_own_words(registry, mock_plugin):
    def read(query):
        raise PlanError("head_dim=0 is outside 1 … 2^20")

    registry.add(mock_plugin("core", tier="core", reads=read))
    with pytest.raises(PlanError, match=r"^head_dim=0 is outside 1 … 2\^20$"):
        resolve.read_model(registry, CONFIG)


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), SystemExit("bye"), KeyError("x")])
def test_a_hook_that_raises_is_named_with_its_distribution(registry, mock_plugin, error):
    def fail(query):
        raise error

    registry.add(mock_plugin("fam", tier="family", reads=fail), distribution="kvdock-fam", version="1.0")
    with pytest.raises(PluginError) as caught:
        resolve.read_model(registry, CONFIG)
    assert str(caught.value) == (
        f"plugin 'fam' (kvdock-fam 1.0): read_model raised {type(error).__name__}: {error}; "
        "report it to its authors, or leave it out with --no-plugin fam"
    )
    assert caught.value.__cause__ is error


def test_what_a_hook_prints_goes_to_standard_error(site, capsys):
    registry = load(site("noisy"))
    capsys.readouterr()
    assert resolve.probe(registry, "noisy", "") is None
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "noisy is asked\n")


def test_a_query_that_grows_does_not_break_a_plugin(registry, pool_query):
    """L-07: a plugin written before a field was added, and one that reads a field that is not there yet."""
    seen = []

    class Old:
        kvdock_contract = "0.1"

        @hookimpl
        def get_pool_cls(self, query):
            seen.append((query.kind, getattr(query, "rows_per_step", 1)))

    class Grown(PoolQuery, frozen=True, kw_only=True):
        rows_per_step: int = 4

    registry.add(Old(), name="old", tier="hardware")
    now = pool_query()
    grown = Grown(**{name: getattr(now, name) for name in now.__struct_fields__})
    for query in (msgspec.structs.replace(now, group=None), msgspec.structs.replace(grown, group=None)):
        assert resolve.pool_cls(registry, query)[0] is None
    assert seen == [("mha", 1), ("mha", 4)]


def test_hook_group_layers_gives_the_groups_of_the_most_specific_tier(registry, mock_plugin, group_query):
    group = LayerGroup(name="ring", kind="ring", space="ring", layers=group_query.layers)
    registry.add(mock_plugin("core", tier="core", groups=()))
    registry.add(mock_plugin("fam", tier="family", groups=(group,)))
    groups, decision = resolve.layer_groups(registry, group_query)
    assert groups == (group,)
    assert (decision.plugin, decision.name) == ("fam", "ring")
    assert decision.subject == "the layers of 'm' (worker target)"


def test_a_rank_may_have_no_group(registry, mock_plugin, group_query):
    registry.add(mock_plugin("core", tier="core", groups=()))
    groups, decision = resolve.layer_groups(registry, group_query)
    assert (groups, decision.name) == ((), "no group")


def test_layers_that_nobody_groups_are_an_error(registry, mock_plugin, group_query):
    registry.add(mock_plugin("fam", tier="family", groups=lambda query: None))
    with pytest.raises(
        PlanError, match=r"no plugin groups the layers of 'm' .*hook group_layers.*; asked: fam; load the"
    ):
        resolve.layer_groups(registry, group_query)


@pytest.mark.parametrize("answer", [[], ("full",), 0])
def test_groups_that_are_no_tuple_of_groups_are_refused(registry, mock_plugin, group_query, answer):
    registry.add(mock_plugin("fam", tier="family", groups=lambda query: answer))
    with pytest.raises(PluginError, match=r"group_layers answered .*; return a tuple of LayerGroup or None"):
        resolve.layer_groups(registry, group_query)


def test_hook_get_option_defaults_is_merged_option_by_option(registry, mock_plugin, options_query):
    """L-15: a plugin's page size is decided once, with its source."""
    registry.add(mock_plugin("hw", tier="hardware", defaults={"page_size": 512, "swa_full_tokens_ratio": 0.1}))
    registry.add(mock_plugin("fam", tier="family", defaults={"page_size": 256}))
    values, decisions = resolve.option_defaults(registry, options_query())
    assert values == {"page_size": (256, "fam"), "swa_full_tokens_ratio": (0.1, "hw")}
    assert [(d.subject, d.plugin, d.name) for d in decisions] == [
        ("the option 'page_size'", "fam", "256"),
        ("the option 'swa_full_tokens_ratio'", "hw", "0.1"),
    ]
    assert decisions[0].answers == (
        Answer(plugin="fam", tier="family", outcome="claimed", detail="256"),
        Answer(plugin="hw", tier="hardware", outcome="claimed", detail="512"),
    )


def test_an_option_that_the_user_gave_is_left_to_the_user(registry, mock_plugin, options_query):
    """L-15: user > plugin > default."""
    registry.add(mock_plugin("hw", tier="hardware", defaults={"page_size": 512}))
    assert resolve.option_defaults(registry, options_query(page_size=64)) == ({}, ())


def test_no_defaults_are_no_error(registry, mock_plugin, options_query):
    registry.add(mock_plugin("hw", tier="hardware", defaults=lambda query: None))
    assert resolve.option_defaults(registry, options_query()) == ({}, ())


def test_two_defaults_of_one_tier_are_an_error(registry, mock_plugin, options_query):
    registry.add(mock_plugin("a", tier="hardware", defaults={"page_size": 64}), distribution="kvdock-a", version="1.0")
    registry.add(mock_plugin("b", tier="hardware", defaults={"page_size": 16}), distribution="kvdock-b", version="2.0")
    with pytest.raises(PluginError) as caught:
        resolve.option_defaults(registry, options_query())
    assert str(caught.value) == (
        "two plugins give different defaults for the option 'page_size':\n"
        "  a   kvdock-a 1.0   kvdock.testing.mocks\n"
        "  b   kvdock-b 2.0   kvdock.testing.mocks\n"
        "Keep one: set page_size yourself, or uninstall the other, or pass --prefer get_option_defaults=a "
        "or --no-plugin b."
    )
    assert resolve.option_defaults(registry, options_query(page_size=32))[0] == {}
    prefer = ("get_option_defaults=b",)
    preferred, (decision,) = resolve.option_defaults(registry, options_query(), prefer=prefer)
    assert preferred == {"page_size": (16, "b")}
    assert decision.answers == (
        Answer(plugin="a", tier="hardware", outcome="outranked", detail="64, lost to prefer get_option_defaults=b"),
        Answer(plugin="b", tier="hardware", outcome="claimed", detail="16"),
    )


def test_a_tie_below_a_more_specific_default_does_not_matter(registry, mock_plugin, options_query):
    registry.add(mock_plugin("a", tier="hardware", defaults={"page_size": 64}))
    registry.add(mock_plugin("b", tier="hardware", defaults={"page_size": 16}))
    registry.add(mock_plugin("fam", tier="family", defaults={"page_size": 256}))
    assert resolve.option_defaults(registry, options_query())[0] == {"page_size": (256, "fam")}


def test_equal_defaults_of_one_tier_are_no_tie(registry, mock_plugin, options_query):
    registry.add(mock_plugin("b", tier="hardware", defaults={"page_size": 64}))
    registry.add(mock_plugin("a", tier="hardware", defaults={"page_size": 64.0}))
    assert resolve.option_defaults(registry, options_query())[0] == {"page_size": (64, "a")}


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"pagesize": 64}, "for the option 'pagesize', which does not exist; did you mean 'page_size'"),
        ({"prefer": ("get_pool_cls=acme",)}, "for the option 'prefer', which is the user's alone"),
        ({"page_size": None}, "gives None for 'page_size'; leave the option out"),
        ({"page_size": 0}, "gives a default that the option does not take: page_size=0 is outside 1 … 2147483647"),
        (
            {"hybrid_swa": "maybe"},
            "gives a default that the option does not take: option hybrid_swa='maybe' does not fit",
        ),
        (
            [("page_size", 64)],
            r"answered \[\('page_size', 64\)\] \(list\); return a mapping of option to value or None",
        ),
    ],
)
def test_a_default_that_cannot_be_is_refused_by_name(registry, mock_plugin, options_query, defaults, message):
    registry.add(mock_plugin("hw", tier="hardware", defaults=defaults))
    with pytest.raises(PluginError, match=rf"^plugin 'hw' \(no distribution\): get_option_defaults .*{message}"):
        resolve.option_defaults(registry, options_query())


def test_hook_size_state_pools_is_merged_space_by_space(registry, mock_plugin, state_query):
    mine = space("full", per_token=(1, 2))
    registry.add(mock_plugin("core", tier="core", spaces={"full": space("full"), "requests": space("requests")}))
    registry.add(mock_plugin("fam", tier="family", spaces={"ring": space("ring"), "full": mine}))
    found, decisions = resolve.spaces(registry, state_query)
    assert found == {"full": mine, "requests": space("requests"), "ring": space("ring")}
    assert {d.subject: d.plugin for d in decisions} == {
        "the space 'full'": "fam",
        "the space 'requests'": "core",
        "the space 'ring'": "fam",
    }


def test_two_different_spaces_of_one_tier_are_an_error(registry, mock_plugin, state_query):
    registry.add(mock_plugin("a", tier="family", spaces={"ring": space("ring", fixed=1)}))
    registry.add(mock_plugin("b", tier="family", spaces={"ring": space("ring", fixed=2)}))
    with pytest.raises(
        PluginError, match=r"(?s)^two plugins declare different rules for the space 'ring':.*pools=a or"
    ):
        resolve.spaces(registry, state_query)
    found, _ = resolve.spaces(registry, state_query, prefer=("size_state_pools=b",))
    assert found["ring"].rule.fixed == 2


def test_equal_spaces_of_one_tier_are_no_tie(registry, mock_plugin, state_query):
    for name in ("a", "b"):
        registry.add(mock_plugin(name, tier="family", spaces={"ring": space("ring", fixed=1)}))
    assert resolve.spaces(registry, state_query)[0] == {"ring": space("ring", fixed=1)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"a": Space(name="b", rule=SizeRule())}, "size_state_pools lists the space 'b' as 'a'; use one name"),
        ({"a": 7}, r"size_state_pools\['a'\] answered 7 \(int\); return a Space or None"),
        ((), r"size_state_pools answered \(\) \(tuple\); return a mapping of name to Space or None"),
    ],
)
def test_spaces_that_are_none_are_refused_by_name(registry, mock_plugin, state_query, answer, message):
    registry.add(mock_plugin("fam", tier="family", spaces=lambda query: answer))
    with pytest.raises(PluginError, match=message):
        resolve.spaces(registry, state_query)


@pytest.mark.parametrize("hook", ["validate_plan", "validate_prefill_only"])
def test_hook_validate_plan_and_hook_validate_prefill_only_collect_all_objections(
    registry, mock_plugin, plan_query, hook
):
    registry.add(mock_plugin("hw.fam", tier="variant", objection="variant objects"))
    registry.add(mock_plugin("hw", tier="hardware", objection="hardware objects"))
    registry.add(mock_plugin("quiet", tier="hardware", objection=lambda query: None))
    registry.add(mock_plugin("core", tier="core", objection=lambda query: f"core objects to {query.device.name}"))
    assert resolve.objections(registry, hook, plan_query) == (
        ("core", "core objects to cpu-1"),
        ("hw", "hardware objects"),
        ("hw.fam", "variant objects"),
    )


@pytest.mark.parametrize("answer", ["", "  ", 0, False, ["no"], ("no", "")])
def test_an_objection_without_a_reason_is_refused(registry, mock_plugin, plan_query, answer):
    registry.add(mock_plugin("hw", tier="hardware", objection=lambda query: answer))
    with pytest.raises(
        PluginError,
        match=r"validate_plan answered .*; return the reason of an objection as text, a tuple of several or None",
    ):
        resolve.objections(registry, "validate_plan", plan_query)


def test_only_validators_have_objections(registry, plan_query):
    with pytest.raises(
        ValueError, match="'get_pool_cls' does not validate; ask one of validate_plan, validate_prefill"
    ):
        resolve.objections(registry, "get_pool_cls", plan_query)
