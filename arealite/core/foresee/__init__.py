"""What a recorded run waited for, and what other settings would have done."""
