"""`PromptPasses`: what the prompts of requests cost a server that decodes others meanwhile.

A step computes all prompts that have come before it in one pass, which costs time of its own besides their tokens.
Many requests at once share a pass. A full server, which starts a request whenever another one ends, pays for one in
almost every step.
"""


class PromptPasses:
    """Counts the passes of `num_servers` servers, which share requests equally."""

    def __init__(self, pass_s: float, num_servers: int = 1):
        self.pass_s, self.num_servers = pass_s, num_servers
        # The present step, and how many servers make a pass in it.
        self._step, self._num_passes = -1, 0

    def start(self, steps: float) -> float:
        """Return the seconds of the pass of a request; 0 if another one in this step has paid for it."""
        if int(steps) != self._step:
            self._step, self._num_passes = int(steps), 0
        if self._num_passes == self.num_servers:
            return 0.0
        self._num_passes += 1
        return self.pass_s
