"""Refusals of sampling values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4jax.errors import SamplingError
from fp4jax.generation.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("temp", (-0.1, NAN, INF, "1", True, None), ">= 0"),
        ("top_p", (0, -0.5, 1.01, NAN, None), r"in \(0, 1\]"),
        ("top_k", (-1, 1.5, True, NAN, "3"), ">= 0"),
        ("min_p", (-0.1, 1.1, NAN), r"in \[0, 1\]"),
        ("repetition_penalty", (0, -1, NAN, INF), "> 0"),
        ("repetition_context_size", (0, -3, 2.0), ">= 1"),
        ("presence_penalty", (-2.1, 2.1, NAN), r"in \[-2, 2\]"),
        ("frequency_penalty", (-2.1, 2.1, NAN), r"in \[-2, 2\]"),
        ("seed", (-1, 2**32, 1.0), r"in \[0, 4294967295\]"),
        ("logprobs", (-1, 0.5), ">= 0"),
        ("max_tokens", (0, -1, 2.5, None), ">= 1"),
        ("stop", ("", ["a", ""], [1], 3), "string"),
        ("stop_token_ids", ([-1], "12", 5, [1.5]), "token ids|>= 0"),
        ("ignore_eos", (1, None), "True or False"),
        ("logit_bias", ({-1: 1.0}, {1: NAN}, {1: INF}, {"x": 1.0}, 3, {1: "a"}), "logit_bias"),
    ],
)
def test_out_of_range_names_field_value_and_range(field, values, allowed):
    for value in values:
        with pytest.raises(SamplingError, match=allowed) as error:
            SamplingParams(**{field: value})
        assert field in str(error.value)


def test_contradictions():
    with pytest.raises(SamplingError, match="twice"):
        SamplingParams(logit_bias={1: 0.5, "1": 2.0})
    with pytest.raises(SamplingError, match="never let through"):
        SamplingParams(logit_bias={4: -INF}, stop_token_ids=[4])
    with pytest.raises(SamplingError, match="bans every token"):
        SamplingParams(logit_bias={0: -INF, 1: -INF}).check_vocabulary(2)


def test_accepted_forms():
    params = SamplingParams(
        temp=0, top_p=0.9, top_k=np.int64(5), stop="x", stop_token_ids=np.asarray([3, 3, 1]),
        logit_bias={"7": 1, 2: -INF}, presence_penalty=np.float32(0.5),
    )  # fmt: skip
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == ((2, -INF), (7, 1.0))
    assert hash(params) == hash(SamplingParams.of(params))
    assert SamplingParams.of(params, temp=1.0).temp == 1.0


def test_unknown_options_name_the_nearest():
    with pytest.raises(SamplingError, match="did you mean 'temp'"):
        SamplingParams.of(None, temperature=1.0)


def test_vocabulary():
    params = SamplingParams(logprobs=5)
    params.check_vocabulary(5)
    with pytest.raises(SamplingError, match=r"logprobs=5 .* 4"):
        params.check_vocabulary(4)
    with pytest.raises(SamplingError, match=r"stop_token_ids names token 9; .* 0 to 8"):
        SamplingParams(stop_token_ids=[9]).check_vocabulary(9)
    with pytest.raises(SamplingError, match="logit_bias names token 9"):
        SamplingParams(logit_bias={9: 1.0}).check_vocabulary(9)
