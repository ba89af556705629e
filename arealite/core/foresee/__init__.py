"""What a recorded run says about its speed: what each step waited for, and what other settings would have done."""
