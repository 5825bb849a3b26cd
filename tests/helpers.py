"""One way to compare, and the papers' formula written out independently of the package."""

import math

import numpy as np
import torch


def assert_close(actual, expected, *, rtol: float | None = None, atol: float = 0.0) -> None:
    """Equal shape and dtype, and close: rtol by the least precise dtype unless given, atol as written at the call."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert actual.shape == expected.shape, f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtypes differ: {actual.dtype} and {expected.dtype}"
    rtol = {torch.float32: 1e-4, torch.float64: 1e-7}.get(actual.dtype, 0.0) if rtol is None else rtol
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def closed_form(z: np.ndarray, kq: np.ndarray, ov: np.ndarray) -> np.ndarray:
    """arXiv 2503.12734, section 1.3, one prompt and one head at a time:

    yhat = sum_h (OV_h)_label . Z softmax(Z^T KQ_h z_query),  Z the context tokens as columns
    """
    predictions = []
    for prompt in z:
        context, query = prompt[:-1], prompt[-1]
        yhat = np.zeros(ov.shape[1])
        for kq_head, ov_head in zip(kq, ov, strict=True):
            logits = np.array([token @ kq_head @ query for token in context])
            weights = np.exp(logits - logits.max())
            yhat += ov_head @ (context.T @ (weights / weights.sum()))
        predictions.append(yhat)
    return np.array(predictions)


def within_stderr(value: float, expected: float, stderr: float, *, sigmas: float = 4.0) -> None:
    """Asserts that a Monte-Carlo value agrees with the truth in units of its own standard error."""
    assert stderr > 0
    assert math.isfinite(stderr)
    assert abs(value - expected) < sigmas * stderr, (
        f"{value} is {abs(value - expected) / stderr:.1f} stderr from {expected}"
    )
