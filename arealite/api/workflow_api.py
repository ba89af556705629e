"""The contract of rollout workflows.

The class is defined beside `InferenceEngine`, because each of them refers to the other.
"""

from arealite.api.engine_api import RolloutWorkflow

__all__ = ["RolloutWorkflow"]
