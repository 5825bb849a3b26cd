import threading

import pytest
import torch

from icl_mechinterp import LinearRegression
from icl_mechinterp.tasks import PromptStream, generator_for

TASK = LinearRegression(d=3, context=5, noise=0.1)


@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "thread"])
def test_the_stream_is_the_generators_in_order(ahead: bool) -> None:
    reference = [generator_for(seed, "prompts") for seed in (0, 4)]
    with PromptStream(TASK, 6, [generator_for(seed, "prompts") for seed in (0, 4)], ahead=ahead) as stream:
        for _ in range(20):
            draw = stream.next()
            for row, generator in enumerate(reference):
                expected = TASK.sample(6, generator=generator)
                assert torch.equal(draw.z[row], expected.z)
                assert torch.equal(draw.target[row], expected.target)
                assert torch.equal(draw.states[row], generator.get_state()), (
                    "the state is the one right after this draw"
                )


def test_a_state_continues_the_stream() -> None:
    with PromptStream(TASK, 6, [generator_for(0, "prompts")], ahead=True) as stream:
        draws = [stream.next() for _ in range(5)]
    generator = torch.Generator()
    generator.set_state(draws[2].states[0])
    with PromptStream(TASK, 6, [generator], ahead=True) as stream:
        assert torch.equal(stream.next().z, draws[3].z)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    stream = PromptStream(TASK, 6, [generator_for(0, "prompts")], ahead=True)
    stream.next()
    stream.close()
    stream.close()
    assert threading.active_count() == before


def test_an_error_of_the_thread_reaches_the_caller() -> None:
    class Failing:
        d, context, n_out, noise = 3, 5, 1, 0.1

        def sample(self, batch: int, **_: object) -> None:
            raise RuntimeError("no more prompts")

        def to_dict(self) -> dict:
            return {}

    with (
        PromptStream(Failing(), 6, [generator_for(0, "prompts")], ahead=True) as stream,
        pytest.raises(RuntimeError, match="no more prompts"),
    ):
        stream.next()


def test_purposes_and_seeds_have_streams_of_their_own() -> None:
    firsts = {
        float(torch.rand(1, generator=generator_for(seed, purpose)))
        for seed in range(20)
        for purpose in ("prompts", "evaluation", "probe", "fit")
    }
    assert len(firsts) == 80
