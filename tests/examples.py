"""How many examples Hypothesis draws: a tenth by default, all with `--hypothesis-profile long`."""

from __future__ import annotations

from hypothesis import settings


def load_quick_profile() -> None:
    """The profile by default; `max_examples` is the share in percent of what `examples` is asked for."""
    settings.register_profile("long", max_examples=100, deadline=None)
    settings.register_profile("quick", max_examples=10, deadline=None)
    settings.load_profile("quick")


def examples(most: int) -> settings:
    """Settings of a property that is shown thoroughly by `most` examples, in the profile loaded just now."""
    return settings(deadline=None, max_examples=max(5, most * settings().max_examples // 100))
