"""Chat messages as tokens; defined in `api`, because `Trajectory` needs them."""

from arealite.api.chat import encode_chat, encode_next

__all__ = ["encode_chat", "encode_next"]
