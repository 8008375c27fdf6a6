"""Weighted sums against hand arithmetic, exact rational sums and autograd's own checks."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.reduce.weighted_sum import weighted_sum, weighted_sums

NAN = float("nan")


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand():
    assert weighted_sum(torch.tensor([2.0, 9, 9, 4]), weights(0.5, 0, 0, 0.5)).item() == 3.0


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_masked_positions_are_selected_away(bad):
    x = torch.tensor([1.0, bad, 3.0], requires_grad=True)
    total = weighted_sum(x, weights(2, 0, -1))
    total.backward()
    assert total.item() == -1.0
    assert x.grad.tolist() == [2.0, 0.0, -1.0]


def test_nan_at_a_counted_position_shows():
    assert weighted_sum(torch.tensor([NAN, 1.0]), weights(1, 1)).isnan()


@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6, width=32), st.floats(-10, 10).map(lambda v: round(v * 8) / 8)
        ),
        max_size=40,
    )
)
def test_matches_rational_arithmetic(pairs):
    x = torch.tensor([p[0] for p in pairs], dtype=torch.float32)
    w = torch.tensor([p[1] for p in pairs], dtype=torch.float64)
    exact = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
    scale = sum((abs(Fraction(a) * Fraction(b)) for a, b in pairs), Fraction(0))
    assert abs(Fraction(weighted_sum(x, w).item()) - exact) <= scale * Fraction(1, 10**14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_values_are_summed_in_float64(dtype):
    x = torch.ones(4097, dtype=dtype)
    assert weighted_sum(x, torch.ones(4097, dtype=torch.float64)).item() == 4097.0


def test_gradient_has_the_dtype_of_the_values():
    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    weighted_sum(x, weights(1, 2, 3)).backward()
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_several_rows_and_gradcheck():
    w = weights(1, 0, 0.25, -3)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(weighted_sums(x, w), (x * w).sum(1))
    assert torch.autograd.gradcheck(lambda v: weighted_sums(v, w), (x,))


def test_no_tokens():
    assert weighted_sum(torch.empty(0), weights()).item() == 0.0


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.ones(3), torch.ones(2).double(), r"\[1, 3\] do not match .* \[2\]"),
        (torch.ones(3), torch.ones(3), r"must be float64 \[T\], got torch.float32 \[3\]"),
        (torch.ones(2, 3), torch.ones(3).double(), r"must be \[T\], got \[2, 3\]"),
        (torch.ones(3).long(), torch.ones(3).double(), "floating point, got torch.int64"),
        (torch.ones(3), torch.ones(3).double().requires_grad_(), "constants of the step"),
    ],
)
def test_bad_input_names_the_shapes(x, w, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(x, w)
