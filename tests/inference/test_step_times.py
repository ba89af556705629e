from arealite.inference.step_times import StepTimes


def test_steps_are_added_by_powers_of_two_of_their_sequences():
    times = StepTimes()
    for sequences, prompt_tokens, seconds, cpu_s in (
        (0, 50, 1.0, 0.5),
        (2, 0, 0.25, 0.25),
        (3, 7, 0.5, 0.25),
        (4, 0, 1.0, 1.0),
    ):
        times.add(sequences, prompt_tokens, seconds, cpu_s)
    times.add(4, 0, 2.0, 2.0, steps=3)
    assert times.rows() == [
        [1, 0, 50, 1.0, 0.5],
        [1, 2, 0, 0.25, 0.25],
        [1, 3, 7, 0.5, 0.25],
        [4, 16, 0, 3.0, 3.0],
    ], "steps with prompts have rows of their own"
