"""Runs the tests of rows and block formats in a process of their own: how kernels run is settled on import."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

FILES = ("interpreted_rows.py", "interpreted_blocks.py", "interpreted_far.py")


def test_rows_and_blocks_hold_in_the_interpreter(passed_alone):
    assert passed_alone(*FILES, TRITON_INTERPRET="1") > 0


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator that Triton compiles for")
def test_rows_and_blocks_hold_on_the_device(passed_alone):
    assert passed_alone(*FILES) > 0
