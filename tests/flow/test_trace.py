"""Arrivals: seeded ones, and trace files of two formats with every way in which a field can be wrong."""

import itertools
import json

import pytest
from kvdock.errors import PlanError
from kvdock.testing.trace import MAX_LENGTH, MAX_LINE_BYTES, Arrival, read_trace, scaled, seeded

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def arrival(timestamp_ms, input_length, output_length):
    return Arrival(timestamp_ms=timestamp_ms, input_length=input_length, output_length=output_length)


@pytest.fixture
def trace(tmp_path):
    def write(content):
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_json_lines_are_read_and_other_fields_left_alone(trace):
    path = trace(
        '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000.5, "input_length": 8.0, "output_length": 0}\n'
    )
    assert list(read_trace(path)) == [arrival(0.0, 6755, 500), arrival(3000.5, 8, 0)]


def test_csv_dates_become_milliseconds_since_the_first_row_to_the_seventh_digit(trace):
    path = trace(
        f"{HEADER}\r\n"
        "2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n"
        "2023-11-17 18:15:46.6805901,1,2\r\n"
    )
    # 50.9951690 - 46.6805900 s; then a day and 100 ns.
    assert list(read_trace(path)) == [
        arrival(0.0, 374, 44),
        arrival(4314.579, 396, 109),
        arrival(86_400_000.0001, 1, 2),
    ]


def test_csv_dates_may_have_a_zone_a_t_and_no_fraction(trace):
    path = trace(f"{HEADER}\n2024-05-10 02:00:00.009930+02:00,1,2\n2024-05-10T00:00:01Z,3,4\n")
    assert [a.timestamp_ms for a in read_trace(path)] == [0.0, 990.07]


def test_csv_columns_may_come_in_any_order_among_others(trace):
    path = trace("id,GeneratedTokens,TIMESTAMP,ContextTokens\n7,44,2023-11-16 18:15:46,374\n")
    assert list(read_trace(path)) == [arrival(0.0, 374, 44)]


def test_blank_lines_and_a_byte_order_mark_are_skipped(trace):
    path = trace(b'\xef\xbb\xbf\n\n  \n{"timestamp": 1, "input_length": 2, "output_length": 3}\n\n')
    assert list(read_trace(path)) == [arrival(1.0, 2, 3)]


def test_a_row_that_is_earlier_arrives_with_the_one_before_it(trace):
    lines = [json.dumps({"timestamp": t, "input_length": 1, "output_length": 1}) for t in (5, 3, 9)]
    assert [a.timestamp_ms for a in read_trace(trace("\n".join(lines)))] == [5.0, 5.0, 9.0]


def test_a_trace_is_read_line_by_line(trace):
    good = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
    arrivals = read_trace(trace(good * 2 + "broken"))
    assert len(list(itertools.islice(arrivals, 2))) == 2
    with pytest.raises(PlanError, match="line 3 is no JSON object"):
        next(arrivals)


JSON = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
WRONG_JSON = {
    '{"timestamp": 1, "output_length": 3}': r"input_length is missing",
    '{"input_length": 2, "output_length": 3}': r"timestamp is missing",
    '{"timestamp": 1, "input_length": 2}': r"output_length is missing",
    '{"timestamp": -1, "input_length": 2, "output_length": 3}': r"timestamp=-1 is no time",
    '{"timestamp": "1", "input_length": 2, "output_length": 3}': r"timestamp='1' is no time",
    '{"timestamp": true, "input_length": 2, "output_length": 3}': r"timestamp=True is no time",
    '{"timestamp": 1, "input_length": -2, "output_length": 3}': r"input_length=-2 is no number of tokens from 1",
    '{"timestamp": 1, "input_length": 0, "output_length": 3}': r"input_length=0 is no number of tokens from 1",
    '{"timestamp": 1, "input_length": 2.5, "output_length": 3}': r"input_length=2.5 is no number",
    '{"timestamp": 1, "input_length": true, "output_length": 3}': r"input_length=True is no number",
    '{"timestamp": 1, "input_length": null, "output_length": 3}': r"input_length=None is no number",
    '{"timestamp": 1, "input_length": 2, "output_length": -1}': r"output_length=-1 is no number of tokens from 0",
    f'{{"timestamp": 1, "input_length": {MAX_LENGTH + 1}, "output_length": 1}}': r"input_length=2147483648 is no number",
    '{"timestamp": 1, "input_length": NaN, "output_length": 3}': r"is no JSON object",
    '{"timestamp": 1, "input_length": 2': r"is no JSON object",
    '["timestamp"]': r"is no JSON object",
}


def test_a_deep_foreign_field_is_read_or_refused_and_never_crashes(trace):
    # How deep a parser goes differs between interpreters.
    deep = f'{{"timestamp": 1, "x": {"[" * 400_000}{"]" * 400_000}, "input_length": 2, "output_length": 3}}'
    try:
        assert list(read_trace(trace(deep))) == [arrival(0.0, 2, 3)]
    except PlanError as error:
        assert "is no JSON object" in str(error)


@pytest.mark.parametrize(("line", "reason"), WRONG_JSON.items(), ids=list(WRONG_JSON.values()))
def test_a_wrong_field_of_a_json_line_is_named_with_file_and_line(trace, line, reason):
    path = trace(JSON + "\n" + line)
    with pytest.raises(PlanError, match=rf"trace '{path}', line 3.*{reason}") as error:
        list(read_trace(path))
    assert len(str(error.value)) < 400


WRONG_CSV = {
    "2023-11-16 18:15:46,,44": r"ContextTokens is missing",
    "2023-11-16 18:15:46,374": r"GeneratedTokens is missing",
    "2023-11-16 18:15:46,many,44": r"ContextTokens='many' is no number",
    "2023-11-16 18:15:46,-3,44": r"ContextTokens=-3 is no number",
    "2023-11-16 18:15:46,3.5,44": r"ContextTokens=3.5 is no number",
    "2023-11-16 18:15:46,3,nan": r"GeneratedTokens=nan is no number",
    ",374,44": r"TIMESTAMP='' is no date",
    "yesterday,374,44": r"TIMESTAMP='yesterday' is no date",
    "2023-13-16 18:15:46,374,44": r"TIMESTAMP='2023-13-16 18:15:46' is no date",
    "2023-11-16 18:15:46.12345678901,374,44": r"is no date; write it as 2023-11-16 18:15:46.6805900",
}


@pytest.mark.parametrize(("line", "reason"), WRONG_CSV.items(), ids=list(WRONG_CSV.values()))
def test_a_wrong_field_of_a_csv_row_is_named_with_file_and_line(trace, line, reason):
    path = trace(f"{HEADER}\n2023-11-16 18:15:46,1,1\n{line}\n")
    with pytest.raises(PlanError, match=rf"trace '{path}', line 3.*{reason}"):
        list(read_trace(path))


@pytest.mark.parametrize("content", ["", "\n \n\n", HEADER + "\n"])
def test_a_trace_without_a_request_is_an_error(trace, content):
    with pytest.raises(PlanError, match="holds no request"):
        list(read_trace(trace(content)))


@pytest.mark.parametrize("content", ["hello", "a,b,c\n1,2,3", "[1]", "TIMESTAMP,ContextTokens"])
def test_another_format_is_named_with_what_is_missing(trace, content):
    with pytest.raises(
        PlanError, match=r"line 1 is neither a JSON object nor a CSV header .*missing: .*GeneratedTokens"
    ):
        list(read_trace(trace(content)))


def test_a_huge_line_is_refused_before_it_is_parsed(trace):
    with pytest.raises(PlanError, match=f"line 2 is longer than {MAX_LINE_BYTES} bytes"):
        list(read_trace(trace(JSON + " " * (MAX_LINE_BYTES + 1))))


def test_bytes_that_are_no_text_are_refused(trace):
    with pytest.raises(PlanError, match="line 2 is not UTF-8 text"):
        list(read_trace(trace(JSON.encode() + b"\xff\xfe")))


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(PlanError, match="cannot be read"):
        list(read_trace(tmp_path / name))


def test_seeded_arrivals_are_the_same_for_the_same_seed_alone():
    assert list(seeded(1, 50, 4096)) == list(seeded(1, 50, 4096))
    assert list(seeded(1, 50, 4096)) != list(seeded(2, 50, 4096))


@pytest.mark.parametrize("context_length", [2, 3, 64, 4096, 2**31])
def test_no_seeded_request_is_longer_than_the_context(context_length):
    drawn = list(seeded(0, 500, context_length))
    assert len(drawn) == 500
    assert all(a.input_length >= 1 and a.output_length >= 1 and a.tokens <= context_length for a in drawn)
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in itertools.pairwise(drawn))


def test_seeded_arrivals_follow_the_medians_and_the_rate():
    drawn = list(seeded(3, 4000, 2**20, median_input=800, median_output=100, per_second=50))
    prompts, answers = (sorted(x) for x in zip(*((a.input_length, a.output_length) for a in drawn), strict=True))
    # The median of 4000 log-normal draws with sigma 0.8 is within 6 % (five standard errors) of the true one.
    assert 750 < prompts[2000] < 850
    assert 94 < answers[2000] < 106
    assert 3800 / 50 < drawn[-1].timestamp_ms / 1000 < 4200 / 50 * 1.1


def test_seeded_answers_are_short_unless_given():
    # Medians of 512 and 64 tokens; within 6 % as above.
    drawn = list(seeded(3, 4000, 2**20))
    prompts, answers = (sorted(x) for x in zip(*((a.input_length, a.output_length) for a in drawn), strict=True))
    assert 481 < prompts[2000] < 543
    assert 60 < answers[2000] < 68


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0, 0, 10), "requests=0 is outside"),
        ((0, 1, 1), "context_length=1 has no room"),
    ],
)
def test_seeded_arrivals_that_cannot_be_are_refused(arguments, reason):
    with pytest.raises(PlanError, match=reason):
        seeded(*arguments)


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(PlanError, match="per_second"):
        seeded(0, 1, 10, per_second=rate)


def test_scaled_lengths_are_rounded_and_a_prompt_keeps_a_token():
    arrivals = [arrival(0.0, 1000, 3), arrival(1.0, 10, 200)]
    assert list(scaled(arrivals, 0.01)) == [arrival(0.0, 10, 0), arrival(1.0, 1, 2)]
    assert list(scaled(arrivals, 1.0)) == arrivals
