"""The shape checks are on: without this test a mistyped option would switch them off unnoticed."""

import pytest
import torch
from jaxtyping import TypeCheckError

from icl_mechinterp.models import query_mask
from icl_mechinterp.models.attention_only import hide_query


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        hide_query(torch.zeros(3, 4))


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(TypeCheckError):
        query_mask(torch.zeros(2, 3, 4, dtype=torch.long))
