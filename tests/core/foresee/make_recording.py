"""Recordings made by hand."""

from arealite.core.foresee.recording import PlayedEpisode, PlayedStep, Recording, Settings


def episode(number, started_at, *parts, step=None, version=0, state="trained", tokens=100):
    """Make an episode of one sample whose parts follow each other."""
    end = started_at + sum(seconds for _, seconds in parts)
    return PlayedEpisode(number, state, version, step, 1, tokens, started_at, end, parts)


def synchronous(num_steps=4, batch=4, generate_s=2.0, reward_s=1.0, late_s=3.0, update_s=1.5, after_s=0.5):
    """Make a run with η = 0: all episodes start with the new weights; the last of each batch takes `late_s` longer."""
    steps, episodes, began = [], [], 100.0
    for number in range(num_steps):
        for i in range(batch):
            more_s = late_s if i == batch - 1 else 0.0
            parts = (("generate", generate_s + more_s), ("reward", reward_s))
            tokens = 900 if i == batch - 1 else 100
            episodes.append(episode(number * batch + i, began, *parts, step=number, version=number, tokens=tokens))
        ready_at = began + generate_s + late_s + reward_s
        waited_s = ready_at - began - (after_s if number else 0.0)
        steps.append(PlayedStep(number, ready_at, waited_s, update_s, update_s + after_s))
        began = ready_at + update_s
    return Recording(Settings(batch), steps, episodes)
